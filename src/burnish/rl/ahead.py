"""One step off: the next batch is sampled while this one is trained on.

Sampling runs in a thread, on devices of its own, with the weights that the engine holds when it starts; the engine gets
no others until it is done. So which weights sampled a batch is a matter of the step's number, not of time: those from
before the previous step's update. A batch that was sampled and not yet trained on is part of a checkpoint, prompts and
completions, because the weights that sampled it are gone by then.
"""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from threading import Event
from typing import Any

import numpy as np

from burnish.data.types import Prompt
from burnish.rollout.types import Completion, Group, StopReason


@dataclass(frozen=True)
class Batch:
    """The completions of one step."""

    groups: list[Group]
    seconds: float  # it took to sample them

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for g in self.groups for c in g.completions)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` makes the same batch of, bit for bit."""
        return {"seconds": self.seconds, "groups": [_group_to_json(group) for group in self.groups]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Batch":
        return cls([_group_from_json(group) for group in value["groups"]], float(value["seconds"]))


class _Cancelled(Exception):
    """Nobody wants the batch any more."""


OnProgress = Callable[[int, int], None]


class SamplingAhead:
    """`sample(step, prompts, on_progress)` in a thread, one batch at a time. Use as a context manager: it leaves no
    thread behind."""

    def __init__(self, sample: Callable[[int, Sequence[Prompt], OnProgress], list[Group]]) -> None:
        self._sample = sample
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampling")
        self._unwanted = Event()
        self._batch: Future[Batch] | None = None

    def start(self, step: int, prompts: Sequence[Prompt]) -> None:
        """Begin with the batch of `step`."""
        self._batch = self._thread.submit(self._run, step, prompts)

    def wait(self) -> Batch | None:
        """The batch that was begun last, once; None where none was. Raises what sampling raised."""
        batch, self._batch = self._batch, None
        return None if batch is None else batch.result()

    def _run(self, step: int, prompts: Sequence[Prompt]) -> Batch:
        def progress(finished: int, tokens: int) -> None:
            if self._unwanted.is_set():
                raise _Cancelled

        start = time.perf_counter()
        return Batch(self._sample(step, prompts, progress), time.perf_counter() - start)

    def __enter__(self) -> "SamplingAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._unwanted.set()
        self._thread.shutdown(wait=True)


_ARRAYS = {"token_ids": np.int32, "logprobs": np.float32, "weight_versions": np.int32}


def _group_to_json(group: Group) -> dict[str, Any]:
    return {"prompt": asdict(group.prompt), "completions": [_completion_to_json(c) for c in group.completions]}


def _group_from_json(value: Mapping[str, Any]) -> Group:
    prompt = Prompt(**value["prompt"] | {"token_ids": tuple(value["prompt"]["token_ids"])})
    return Group(prompt, tuple(_completion_from_json(c) for c in value["completions"]))


def _completion_to_json(completion: Completion) -> dict[str, Any]:
    arrays = {
        name: base64.b64encode(np.ascontiguousarray(getattr(completion, name), dtype).tobytes()).decode()
        for name, dtype in _ARRAYS.items()
    }
    return arrays | {"stop_reason": str(completion.stop_reason), "text": completion.text, "seed": completion.seed}


def _completion_from_json(value: Mapping[str, Any]) -> Completion:
    arrays = {name: np.frombuffer(base64.b64decode(value[name]), dtype) for name, dtype in _ARRAYS.items()}
    return Completion(**arrays, stop_reason=StopReason(value["stop_reason"]), text=value["text"], seed=value["seed"])
