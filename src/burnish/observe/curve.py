"""The picture of a run: reward and accuracy over the steps, with the evaluations before and after."""

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from burnish.observe.files import write_whole

REWARD_COLOR, ACCURACY_COLOR, FORMAT_COLOR = "#1f5fa8", "#c2571a", "#3d8c40"


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average of an array (T,) that may hold NaN; the window is cut at the ends. NaN where
    no value is inside the window.
    """
    known = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="full")
    counts = np.convolve(known.astype(float), kernel, mode="full")
    start = (window - 1) // 2
    sums, counts = sums[start : start + len(values)], counts[start : start + len(values)]
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def plot_rewards(
    metrics: Sequence[Mapping[str, Any]],
    path: epath.PathLike,
    accuracy_before: float | None = None,
    accuracy_after: float | None = None,
    title: str = "",
) -> None:
    """Draws reward/mean and accuracy (format_accuracy too, where there is one) of the lines of
    metrics.jsonl and writes a PNG. The accuracies of the evaluation (0 to 1) are points before the first
    and after the last step. Raises ValueError without a step.
    """
    if not metrics:
        raise ValueError(f"no steps to draw in {os.fspath(path)}")
    steps = np.array([row["step"] for row in metrics])
    window = max(1, min(25, len(steps) // 8)) | 1  # odd, so that the average is centred
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    reward, accuracy = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))

    _draw(reward, steps, _series(metrics, "reward/mean"), window, REWARD_COLOR, "mean reward")
    reward.set_ylabel("mean reward")
    _draw(accuracy, steps, _series(metrics, "accuracy"), window, ACCURACY_COLOR, "right answer in training")
    formats = _series(metrics, "format_accuracy")
    if np.isfinite(formats).any():
        _draw(accuracy, steps, formats, window, FORMAT_COLOR, "right format in training")
    margin = max(1.0, 0.05 * (steps[-1] - steps[0]))
    _mark_evaluations(accuracy, steps, margin, accuracy_before, accuracy_after)
    accuracy.set_ylabel("share of completions")
    accuracy.set_ylim(-0.03, 1.03)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    accuracy.set_xlabel("training step")
    accuracy.set_xlim(steps[0] - 2.2 * margin, steps[-1] + 2.2 * margin)
    accuracy.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    accuracy.legend(loc="best", framealpha=0.85, edgecolor="none", fontsize=9)
    for axes in (reward, accuracy):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=12)
    if window > 1:
        note = f"thin: each step, thick: mean over {window} steps"
        reward.text(0.01, 0.97, note, transform=reward.transAxes, va="top", fontsize=8, color="0.4")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_whole(path, buffer.getvalue())


def _series(metrics: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """One metric as float64 (T,); NaN where a step has none or null."""
    return np.array([np.nan if row.get(name) is None else row[name] for row in metrics], float)


def _draw(axes: Axes, steps: np.ndarray, values: np.ndarray, window: int, color: str, label: str) -> None:
    if window > 1:
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        values = smoothed(values, window)
    axes.plot(steps, values, color=color, linewidth=2.2, label=label, marker="o" if len(steps) == 1 else None)


def _mark_evaluations(axes: Axes, steps: np.ndarray, margin: float, before: float | None, after: float | None) -> None:
    label = "right answer in evaluation"
    for x, value in ((steps[0] - margin, before), (steps[-1] + margin, after)):
        if value is None:
            continue
        axes.plot([x], [value], "D", color=ACCURACY_COLOR, mec="white", markersize=9, zorder=5, label=label)
        label = "_"  # one legend entry for both
        below = value > 0.12
        text = axes.annotate(
            f"{100 * value:.1f} %",
            (x, value),
            xytext=(0, -9 if below else 9),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            fontweight="bold",
            zorder=6,
        )
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
