"""metrics.jsonl reads as if the run had never been interrupted, and holds only what the guide explains."""

import errno
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tensorboardX import proto

from burnish.observe import files, metrics
from burnish.observe.metrics import METRICS, MetricsWriter, read_metrics

GUIDE = Path(__file__).parents[2] / "docs/guides/metrics.md"


def write_steps(path: Path, steps: range, resume_step: int | None = None, shift: float = 0.0) -> None:
    with MetricsWriter(path, resume_step=resume_step) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": step + shift, "accuracy": 0.5})


def test_a_line_holds_the_step_and_finite_numbers_or_null(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(3, {"reward/mean": np.float32(0.5), "kl": float("nan"), "grad_norm": float("inf"), "accuracy": 1})
        # Flushed: another process sees the line before the writer is closed.
        assert json.loads((tmp_path / "m.jsonl").read_text()) == {
            "step": 3,
            "reward/mean": 0.5,
            "kl": None,
            "grad_norm": None,
            "accuracy": 1.0,
        }


def test_an_interrupted_run_leaves_the_file_of_an_uninterrupted_one(tmp_path):
    write_steps(tmp_path / "whole.jsonl", range(1, 7))
    write_steps(tmp_path / "cut.jsonl", range(1, 6), shift=0.0)
    write_steps(tmp_path / "cut.jsonl", range(4, 7), resume_step=3)
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("torn", ['{"step": 3, "rew', '{"step": 3}', "\x00\x00\x00"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    write_steps(path, range(1, 3))
    whole = path.read_text()
    path.write_text(whole + torn)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    write_steps(path, range(3, 4), resume_step=2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ["{", "[1]", '{"reward/mean": 1}', "", "3"])
def test_another_broken_line_is_named(tmp_path, line):
    (tmp_path / "m.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl line 2 is no metrics line"):
        read_metrics(tmp_path / "m.jsonl")


def test_resuming_drops_lines_atomically(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    write_steps(path, range(1, 6))
    before = path.read_text()

    def fails(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        MetricsWriter(path, resume_step=2)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_new_run_does_not_append_to_an_old_one(tmp_path):
    write_steps(tmp_path / "m.jsonl", range(1, 3))
    with pytest.raises(ValueError, match="already holds 2 steps"):
        MetricsWriter(tmp_path / "m.jsonl")


def test_steps_must_grow(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(2, {})
        with pytest.raises(ValueError, match="step 2 does not follow step 2"):
            writer.write(2, {})


def test_an_unknown_name_is_refused_with_the_nearest_ones(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        with pytest.raises(ValueError, match=r"'reward/maen' is not in .*near: reward/mean"):
            writer.write(1, {"reward/maen": 1.0})
        with pytest.raises(ValueError, match="reward_parts/"):
            writer.write(1, {"reward_parts/": 1.0})
        writer.write(1, {"reward_parts/my_reward": 1.0})
    assert len(read_metrics(tmp_path / "m.jsonl")) == 1


def test_an_object_store_gets_the_same_file(tmp_path, monkeypatch):
    write_steps(tmp_path / "local.jsonl", range(1, 4))
    monkeypatch.setattr(metrics, "is_local", lambda path: False)
    write_steps(tmp_path / "remote.jsonl", range(1, 3))
    write_steps(tmp_path / "remote.jsonl", range(3, 4), resume_step=2)
    assert (tmp_path / "remote.jsonl").read_text() == (tmp_path / "local.jsonl").read_text()


def events_of(directory: Path) -> list[proto.event_pb2.Event]:
    """All events of a directory: TFRecord framing is length (8), CRC (4), data, CRC (4)."""
    events = []
    for path in sorted(directory.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            events.append(proto.event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
            at += length + 16
    return events


def test_tensorboard_gets_the_same_numbers_and_disregards_dropped_steps(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl", tmp_path / "tb") as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": step / 2})
    scalars = [(e.step, v.tag, v.simple_value) for e in events_of(tmp_path / "tb") for v in e.summary.value]
    assert scalars == [(1, "reward/mean", 0.5), (2, "reward/mean", 1.0), (3, "reward/mean", 1.5)]

    with MetricsWriter(tmp_path / "m.jsonl", tmp_path / "tb2", resume_step=1) as writer:
        writer.write(2, {"reward/mean": 7.0})
    starts = [e.step for e in events_of(tmp_path / "tb2") if e.HasField("session_log") and e.session_log.status == 1]
    assert starts == [2]


def test_the_guide_has_the_table_of_all_metrics():
    begin, end = "prints it -->\n", "<!-- end of the table -->"
    table = GUIDE.read_text().split(begin)[1].split(end)[0]
    assert table == metrics.metrics_table()
    assert len(table.splitlines()) == len(METRICS) + 2


def test_every_metric_says_its_unit_and_meaning():
    for name, metric in METRICS.items():
        assert metric.unit, name
        assert metric.meaning.endswith((".", ")")), name


def test_the_room_runs_without_jax():
    code = (
        "import sys, burnish.observe.metrics, burnish.observe.rollouts, burnish.observe.terminal, "
        "burnish.observe.curve, burnish.observe.summary; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_events_that_cannot_be_written_are_an_error_and_no_endless_wait(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path / "m.jsonl", tmp_path / "tb") as writer:
        worker = writer._events.file_writer.event_writer._worker

        def full(event):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        monkeypatch.setattr(worker._record_writer, "write_event", full)
        writer.write(1, {"loss": 1.0})
        worker.join(timeout=10)
        with pytest.raises(OSError, match="TensorBoard events cannot be written"):
            writer.write(2, {"loss": 1.0})
