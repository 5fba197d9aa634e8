"""Rollout records: what was sampled in each step and what it was worth, one Parquet file per step.

A row is one completion with everything needed to look at it, score it again or check the training on it.
Files are written whole or not at all, so a step that is done again after a resume replaces its own file.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from burnish.observe.files import write_whole


@dataclass(frozen=True)
class RolloutRow:
    """One completion of C tokens, the stop token included; ids are as sampled, never encoded from text."""

    step: int
    prompt_index: int  # row number in the data set
    question: str
    answer: str  # the gold answer
    prompt_ids: list[int]
    completion_ids: list[int]  # length C
    completion: str
    logprobs: list[float] | None  # length C, the sampler's; None where they are not recorded
    weight_versions: list[int]  # length C, the weight version that made each token
    stop_reason: str  # stop | stop_string | length
    seed: int
    reward_parts: dict[str, float]
    reward: float  # the sum of the parts
    advantage: float
    score_status: str  # scored | timed_out | failed
    correct: bool
    format_ok: bool
    extracted: str | None  # the answer found in the completion


SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("prompt_index", pa.int64(), nullable=False),
        pa.field("question", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion", pa.string(), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("weight_versions", pa.list_(pa.int32()), nullable=False),
        pa.field("stop_reason", pa.string(), nullable=False),
        pa.field("seed", pa.uint64(), nullable=False),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("advantage", pa.float64(), nullable=False),
        pa.field("score_status", pa.string(), nullable=False),
        pa.field("correct", pa.bool_(), nullable=False),
        pa.field("format_ok", pa.bool_(), nullable=False),
        pa.field("extracted", pa.string()),
    ]
)


def rollouts_path(directory: epath.PathLike, step: int) -> epath.Path:
    """Where the rollouts of a step lie."""
    return epath.Path(directory) / f"step_{step:06d}.parquet"


def write_rollouts(directory: epath.PathLike, step: int, rows: Sequence[RolloutRow]) -> epath.Path:
    """Writes the rollouts of a step and returns the file. Raises ValueError when a row is of another step,
    when its token lists differ in length, and for values that the schema has no place for.
    """
    for row in rows:
        if row.step != step:
            raise ValueError(f"a row of step {row.step} among the rollouts of step {step}")
        lengths = {len(x) for x in (row.completion_ids, row.weight_versions, row.logprobs) if x is not None}
        if len(lengths) > 1:
            raise ValueError(
                f"prompt {row.prompt_index}: ids, logprobs and weight versions differ in length: {lengths}"
            )
    columns = {field.name: pa.array([_plain(getattr(row, field.name)) for row in rows], field.type) for field in SCHEMA}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns, schema=SCHEMA), buffer, compression="zstd")
    path = rollouts_path(directory, step)
    write_whole(path, buffer.getvalue())
    return path


def read_rollouts(directory: epath.PathLike, step: int) -> list[RolloutRow]:
    """The rollouts of a step. Raises FileNotFoundError when it has none."""
    data = rollouts_path(directory, step).read_bytes()
    rows = pq.read_table(io.BytesIO(data)).to_pylist(maps_as_pydicts="strict")
    return [RolloutRow(**row) for row in rows]


def rollout_steps(directory: epath.PathLike) -> list[int]:
    """The steps that have rollouts, ascending."""
    path = epath.Path(directory)
    if not path.exists():
        return []
    names = [entry.name for entry in path.iterdir()]
    return sorted(int(n[5:-8]) for n in names if n.startswith("step_") and n.endswith(".parquet"))


def drop_rollouts_after(directory: epath.PathLike, step: int) -> None:
    """Deletes the rollouts beyond the step that a run resumes from."""
    for later in rollout_steps(directory):
        if later > step:
            rollouts_path(directory, later).unlink()


def _plain(value: object) -> object:
    """Maps go to Arrow as lists of pairs; everything else as it is."""
    return list(value.items()) if isinstance(value, dict) else value
