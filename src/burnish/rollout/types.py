"""What a rollout is: the interface that every generation engine implements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from burnish.data.types import Prompt
from burnish.parallel.transfer import Transfer


class StopReason(StrEnum):
    STOP = "stop"  # a stop token was sampled; it is the last token of the completion
    STOP_STRING = "stop_string"  # the text ends with (or first contains) a stop string
    LENGTH = "length"  # the token limit was reached


@dataclass(frozen=True)
class SamplingParams:
    """How to draw completions. temperature 0 is greedy; top_k 0 and top_p 1 and min_p 0 cut nothing."""

    max_total_tokens: int  # of prompt and completion: a completion gets at most this less len(prompt)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_stop: bool = False  # sample exactly up to the limit (benchmarks)


@dataclass(frozen=True)
class Completion:
    """One sampled completion. All arrays have shape (C,), C tokens with the stop token included."""

    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32, log-probability at the sampling temperature before top-k/top-p/min-p
    weight_versions: np.ndarray  # int32, the weight version that made each token
    stop_reason: StopReason
    text: str  # decoded without special tokens; never encoded again
    seed: int


@dataclass(frozen=True)
class Group:
    """A prompt and its G completions."""

    prompt: Prompt
    completions: tuple[Completion, ...]


class RolloutEngine(Protocol):
    """`load_weights` is called after every update; `generate` may be called any number of times between."""

    def load_weights(self, params: Any, version: int) -> Transfer | None:
        """Take over the trainer's tree, which may be given away afterwards. Where it comes from other devices, what
        was moved."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        sampling: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Group]:
        """One Group per prompt, in order; seeds[i] has one seed per completion of prompt i (its length is G).
        The same (prompt, seed, weights, sampling) gives the same tokens whatever else is in the batch.
        `on_progress(finished completions, tokens so far)` is called between chunks."""
        ...

    def release_memory(self) -> None:
        """Give device memory back that is not needed until the next `load_weights`, as the trainer may use it."""
        ...

    @property
    def num_compilations(self) -> int: ...
