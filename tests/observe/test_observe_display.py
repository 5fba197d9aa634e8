"""What is printed and drawn: aligned lines, bars only in terminals, a right table, picture and summary."""

import io
import json

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from burnish.observe import files
from burnish.observe.curve import plot_rewards, smoothed
from burnish.observe.metrics import METRICS
from burnish.observe.summary import BeforeAfter, duration, print_final, write_summary
from burnish.observe.terminal import COLUMNS, StepPrinter

METRICS_OF_A_STEP = {
    "reward/mean": 0.51234,
    "accuracy": 0.453,
    "format_accuracy": 0.9,
    "completion_length/mean": 123.45,
    "truncated_fraction": 0.02,
    "entropy": 0.41,
    "kl": 0.0012,
    "logprob_difference/mean": 3.2e-7,
    "learning_rate": 3e-6,
    "loss": 1e-9,
    "seconds/sampling": 1.5,
    "seconds/reward": 0.2,
    "seconds/update": 2.25,
    "seconds/step": 4.0,
    "tokens_per_second/sampling": 2345.6,
    "tokens_per_second/update": 3456.7,
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def printed(width: int = 200, terminal: bool = False, metrics: dict[str, float] | None = None) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, _environ={})
    with StepPrinter(12, console=console) as printer:
        printer.note("a [note] with /a/path")
        for step in (1, 2):
            printer.sampling(f"step {step}", 3, 8, 100)
            printer.phase(f"step {step}: update")
            printer.step(step, metrics or METRICS_OF_A_STEP)
    return console.file.getvalue()


def test_a_step_is_one_aligned_line_with_its_figures():
    lines = printed().splitlines()
    header = next(line for line in lines if "reward" in line and "eta" in line)
    first, second = lines[-2:]
    figures = "1/12 +0.512 45.3 90.0 123.5 2 0.410 0.0012 3e-07 3.0e-06 1.50 0.20 2.25 2346 3457 44.0 s"
    assert " ".join(first.split()) == figures
    assert len(header) == len(first) == len(second)
    assert lines[0] == "a [note] with /a/path"


def test_the_legend_explains_the_columns_that_are_shown():
    text = " ".join(printed().split())
    for column in COLUMNS:
        assert (f"{column.title}: {column.meaning}" in text) == (column.title != "loss")


def test_supervised_training_shows_its_loss():
    text = printed(metrics={"loss": 1.25, "learning_rate": 1e-3, "tokens_per_second/update": 100.0})
    assert "loss" in text
    assert "1.2500" in text
    assert "reward" not in text


def test_without_a_terminal_there_are_no_control_characters():
    assert "\x1b" not in printed()
    assert "\r" not in printed()


@pytest.mark.parametrize("variable", [None, "CI", "NO_COLOR"])
def test_a_bar_shows_sampling_only_in_a_terminal(monkeypatch, variable):
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    assert ("\x1b[?25l" in printed(terminal=True)) == (variable is None)
    assert "completions" not in printed()


def test_a_narrow_terminal_keeps_reward_and_accuracy(monkeypatch):
    monkeypatch.setenv("CI", "1")
    for width in (60, 80, 100):
        lines = printed(width, terminal=True).splitlines()
        assert all(len(line) <= width for line in lines)
        assert any("reward" in line and "acc%" in line and "eta" in line for line in lines)


def test_columns_read_metrics_that_exist():
    asked = set()

    class Asking(dict):
        def __contains__(self, name):
            asked.add(name)
            return False

    for column in COLUMNS:
        column.show(Asking())
    assert asked
    assert asked <= METRICS.keys()


def test_durations_in_words():
    assert [duration(s) for s in (4.24, 59.9, 200, 3600, 7500)] == [
        "4.2 s",
        "59.9 s",
        "3 min 20 s",
        "1 h 00 min",
        "2 h 05 min",
    ]


FIGURES = [
    BeforeAfter("accuracy", 0.45, 0.87),
    BeforeAfter("format accuracy", 0.5, 0.25),
    BeforeAfter("mean reward", 0.4, 1.1, percent=False),
]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_final_table_has_figures_time_and_places(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=60, no_color=True, _environ={})
    long_path = "/runs/" + "deep/" * 20 + "hf"
    print_final(FIGURES, 203.0, {"model": long_path, "metrics": "/runs/m.jsonl"}, console)
    text = console.file.getvalue()
    words = text.replace("│", " ").split()
    for part in ("45.0 % 87.0 % +42.0", "50.0 % 25.0 % -25.0", "0.400 1.100 +0.700", "3 min 23 s"):
        assert part in " ".join(words)
    assert long_path in words  # on one line, to be copied
    assert ("│" in text) == terminal


def test_the_summary_is_json_and_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "run/summary.json"
    write_summary(path, {"accuracy_before": 0.45, "accuracy_after": float("nan"), "steps": 3})
    assert json.loads(path.read_text()) == {"accuracy_before": 0.45, "accuracy_after": None, "steps": 3}

    def fails(fd: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        write_summary(path, {"steps": 4})
    assert json.loads(path.read_text())["steps"] == 3
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]


def test_smoothing_is_a_centred_mean_that_skips_gaps():
    rng = np.random.default_rng(0)
    values = rng.normal(size=17)
    values[[3, 4, 12]] = np.nan
    for window in (1, 3, 7, 25):
        half = window // 2
        expected = [
            np.nanmean(x) if np.isfinite(x := values[max(0, i - half) : i + half + 1]).any() else np.nan
            for i in range(len(values))
        ]
        np.testing.assert_allclose(smoothed(values, window), expected)


@pytest.mark.parametrize("num_steps", [1, 3, 40])
def test_the_curve_is_a_picture(tmp_path, num_steps):
    rows = [{"step": i + 1, "reward/mean": i / num_steps, "accuracy": 0.5} for i in range(num_steps)]
    rows[0]["reward/mean"] = None
    plot_rewards(rows, tmp_path / "c.png", 0.45, 0.87, title="a run")
    picture = matplotlib.image.imread(tmp_path / "c.png")
    assert picture.shape[0] > 500
    assert picture.shape[1] > 800
    assert picture[..., :3].std() > 0.01
    assert [p.name for p in tmp_path.iterdir()] == ["c.png"]


def test_a_curve_without_steps_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no steps to draw"):
        plot_rewards([], tmp_path / "c.png")
