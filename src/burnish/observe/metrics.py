"""Numbers of a run over time: one JSON line per step in metrics.jsonl, the same as TensorBoard events.

METRICS is the one list of what may be written; docs/guides/metrics.md is made from it. A resumed run drops
the lines beyond the step it resumes from, so that the file reads as if the run had never been interrupted.
"""

import difflib
import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from etils import epath
from tensorboardX import SummaryWriter

from burnish.errors import BurnishError
from burnish.observe.files import is_local, write_whole


@dataclass(frozen=True)
class Metric:
    """What a metric is measured in and what it says."""

    unit: str
    meaning: str


REWARD_PART = "reward_parts/"  # followed by the name of a part of the reward stack

METRICS: dict[str, Metric] = {
    "reward/mean": Metric("reward", "Mean total reward of the step's completions."),
    "reward/std": Metric("reward", "Standard deviation of the total reward over the step's completions."),
    f"{REWARD_PART}<name>": Metric(
        "reward", "Mean of one part of the reward: which part moves is seen here, not in the total."
    ),
    "accuracy": Metric("share", "Completions whose extracted answer equals the gold answer."),
    "partial_accuracy": Metric("share", "Completions whose numeric answer is within 10 % of the gold one."),
    "format_accuracy": Metric("share", "Completions with the tags exactly in the asked form."),
    "completion_length/mean": Metric("tokens", "Mean length of a completion, stop token included."),
    "completion_length/max": Metric("tokens", "Longest completion of the step."),
    "truncated_fraction": Metric("share", "Completions that hit the token limit instead of stopping."),
    "entropy": Metric(
        "nats/token",
        "How undecided the policy is, at the sampling temperature. A fast fall to 0 means that the samples "
        "of a group become alike and the signal dries up.",
    ),
    "kl": Metric(
        "nats/token",
        "Estimated divergence from the reference weights (k3 estimator); absent where rl.grpo_beta is 0.",
    ),
    "logprob_difference/mean": Metric(
        "nats",
        "Mean |sampler logprob - trainer logprob| per sampled token, before the update. Rounding only: about "
        "1e-6 in float32, 1e-2 in bfloat16. More means that sampler and trainer do not run the same model; "
        "the run stops above rl.max_logprob_difference. With rl.off_policy_steps it is also what an update changed.",
    ),
    "logprob_difference/max": Metric("nats", "The largest such difference of the step."),
    "loss": Metric(
        "1",
        "The loss that was minimised. That it is 0 at the start is right, and with one on-policy update per "
        "batch it stays near 0: the advantages of a group sum to 0 and every ratio is 1, only the gradient "
        "is not 0. Watch the reward instead. (For sft: cross-entropy per completion token, which does fall.)",
    ),
    "grad_norm": Metric("1", "L2 norm of the whole gradient before clipping."),
    "clip_fraction": Metric(
        "share",
        "Tokens whose ratio was clipped; 0 with one on-policy update per batch, where every ratio is 1.",
    ),
    "off_policy/steps": Metric(
        "steps",
        "How many steps old the weights were that sampled the tokens, on average (rl.off_policy_steps only, like the "
        "two below).",
    ),
    "off_policy/weight": Metric(
        "1",
        "Mean importance weight of a token: how much likelier the trainer's weights make it than those that sampled "
        "it, at most rl.importance_weight_cap. Near 1 is well.",
    ),
    "off_policy/truncated": Metric("share", "Tokens whose importance weight was cut to rl.importance_weight_cap."),
    "experts/load_max": Metric(
        "1",
        "Completion tokens of the busiest expert of any layer, in multiples of an even share (mixtures of experts "
        "only). Prompts do not count here and in the two below: how often one is read depends on how rows are filled.",
    ),
    "experts/idle": Metric("share", "Experts, over all layers, that got no completion token of the update."),
    "experts/router_entropy": Metric(
        "nats",
        "How evenly the router spreads a completion token's probability, mean over layers; log of the experts is even.",
    ),
    "zero_advantage_groups": Metric(
        "share",
        "Groups whose completions all have the same reward: they teach nothing and are not trained on.",
    ),
    "weights_changed": Metric(
        "share",
        "Stored weights that the update changed. Far below 1: updates are lost to the rounding of "
        "weight_dtype=bfloat16.",
    ),
    "nonfinite_updates": Metric("count", "Updates of the step left out because the gradient was not finite."),
    "learning_rate": Metric("1", "Learning rate of the step's last update."),
    "scores/timed_out": Metric("count", "Completions whose check did not end before math_verify_timeout."),
    "scores/failed": Metric("count", "Completions whose check raised an exception."),
    "seconds/sampling": Metric("s", "Time to sample the step's completions."),
    "seconds/reward": Metric("s", "Time to score them."),
    "seconds/update": Metric("s", "Time for advantages, packing, forward, backward and optimizer."),
    "seconds/waiting": Metric(
        "s",
        "Time that the trainer waited for the next step's completions, which were sampled meanwhile "
        "(rl.off_policy_steps only). Much of it: sampling is the longer half, and wants more devices.",
    ),
    "seconds/reshard": Metric(
        "s",
        "Time to move the new weights to the sampler, where that is vLLM or has devices of its own; part of "
        "seconds/update.",
    ),
    "seconds/checkpoint": Metric("s", "Time to save a checkpoint; 0 on steps without one."),
    "seconds/step": Metric("s", "Time of the whole step."),
    "tokens_per_second/sampling": Metric("tokens/s", "Sampled tokens per second of sampling."),
    "tokens_per_second/update": Metric("tokens/s", "Trained tokens, prompts included, per second of update."),
    "compilations": Metric(
        "count",
        "Compilations since the start. It grows when a batch needs a new length of rows, and levels off.",
    ),
}


class MetricsError(BurnishError, ValueError):
    """A metrics.jsonl is not what a run wrote."""


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a name that METRICS does not list, with the nearest ones."""
    for name in names:
        if name in METRICS or (name.startswith(REWARD_PART) and len(name) > len(REWARD_PART)):
            continue
        near = difflib.get_close_matches(name, METRICS, n=3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"metric {name!r} is not in burnish.observe.metrics.METRICS{hint}")


def metrics_table() -> str:
    """METRICS as a Markdown table, as in docs/guides/metrics.md."""
    rows = ["| `{}` | {} | {} |".format(n, m.unit, m.meaning.replace("|", "\\|")) for n, m in METRICS.items()]
    return "\n".join(["| Metric | Unit | Meaning |", "|---|---|---|", *rows]) + "\n"


class MetricsWriter:
    """Appends one line per step to `path`, and scalar events to `tensorboard_dir` where one is given.

    A line is {"step": n, name: number or null, ...}: null stands for NaN and infinities, which JSON lacks.
    Each line is flushed. Object stores have no append: on gs:// the file is written anew with every line.
    """

    def __init__(
        self,
        path: epath.PathLike,
        tensorboard_dir: epath.PathLike | None = None,
        resume_step: int | None = None,
    ) -> None:
        """`resume_step`: None for a new run, else the last step to keep. Raises ValueError when a new run
        finds metrics at `path` and when a line other than a torn last one cannot be read.
        """
        self._path = os.fspath(path)
        kept = read_metrics(path) if epath.Path(path).exists() else []
        if kept and resume_step is None:
            raise ValueError(f"{self._path} already holds {len(kept)} steps of a run")
        if resume_step is not None:
            kept = [row for row in kept if row["step"] <= resume_step]
        self._last_step = kept[-1]["step"] if kept else None
        self._text = "".join(_line(row) for row in kept)
        write_whole(path, self._text)
        self._events = None
        if tensorboard_dir is not None:
            # Events of dropped steps stay in the old files; purge_step makes TensorBoard disregard them.
            purge = None if resume_step is None else resume_step + 1
            # The queue has room for several steps: events are written by a thread, and one that died of a full
            # disk takes none; `write` then finds it dead instead of waiting for ever.
            self._events = SummaryWriter(os.fspath(tensorboard_dir), purge_step=purge, max_queue=1000)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the step's numbers (anything that float() takes). Raises ValueError for a name that
        METRICS does not list and for a step that does not follow the last one.
        """
        check_names(list(metrics))
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} does not follow step {self._last_step} in {self._path}")
        values = {name: float(value) for name, value in metrics.items()}
        line = _line({"step": step, **{n: v if math.isfinite(v) else None for n, v in values.items()}})
        if is_local(self._path):
            with open(self._path, "a", encoding="utf-8") as f:
                f.write(line)
        else:
            self._text += line
            write_whole(self._path, self._text)
        self._last_step = step
        if self._events is not None:
            if not self._events.file_writer.event_writer._worker.is_alive():
                raise OSError(errno.ENOSPC, "TensorBoard events cannot be written", str(self._events.logdir))
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()

    @property
    def last_step(self) -> int | None:
        """The step of the last line, None without one."""
        return self._last_step

    def close(self) -> None:
        """Ends the TensorBoard file; metrics.jsonl is complete after every write."""
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: epath.PathLike) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in order. A torn last line, left by a process that was killed while
    writing it, is left out. Raises MetricsError for any other line that is not a JSON object with a step.
    """
    lines = epath.Path(path).read_bytes().decode(errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # behind the last line end there is nothing, or a torn line
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            raise MetricsError(
                f"{os.fspath(path)} line {number} is no metrics line: {line[:80]!r}; delete that line to go on"
            ) from None
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


if __name__ == "__main__":
    print(metrics_table(), end="")
