"""What the update consumes: packed rows of tokens with a list of the tokens to be trained, and whole-step counts.

Trained tokens are a list per row, apart from the tokens themselves, because the first tokens of all completions of
a group are predicted from one position, the prompt's last, and because only trained tokens need the vocabulary
projection. Nothing here knows how rows were filled (packing.py) or what is done with them (losses.py).
"""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: B rows of T tokens. The second block is the list of trained tokens of each row, left-filled,
    as long as the row (a row cannot train more tokens than it holds); entries where `trained` is False are 0."""

    tokens: jax.Array  # (B, T) int32
    positions: jax.Array  # (B, T) int32, completions continue from their prompt's end
    segments: jax.Array  # (B, T) int32, 0 = padding
    branches: jax.Array  # (B, T) int32, 0 = prompt, 1.. = completions of that prompt

    trained: jax.Array  # (B, T) bool
    source: jax.Array  # (B, T) int32, index in the row of the token whose hidden state predicts this one
    targets: jax.Array  # (B, T) int32, the token id to be predicted
    sequences: jax.Array  # (B, T) int32, which completion of the micro-batch it belongs to, counted from 0
    lengths: jax.Array  # (B, T) float32, tokens of that completion
    advantages: jax.Array  # (B, T) float32
    sampler_logprobs: jax.Array  # (B, T) float32, at the sampling temperature
    count: jax.Array  # () int32, entries of the longest list: columns from here on are empty in every row

    old_logprobs: jax.Array | None = None  # (B, T) float32, of the policy before this batch's first update
    reference_logprobs: jax.Array | None = None  # (B, T) float32, of the reference model


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Denominators:
    """Counts over the whole optimizer step, the same for every micro-batch of it. `sequences` and `tokens` include
    completions that were left out of the rows because their gradient is known to be 0."""

    sequences: jax.Array | float  # completions that count
    tokens: jax.Array | float  # their tokens
    trained_tokens: jax.Array | float  # tokens in the rows; per-token metrics are means over these


@dataclass(frozen=True)
class PackedStep:
    """Everything one optimizer step trains on."""

    micro_batches: tuple[PackedBatch, ...]  # NumPy arrays, all of one shape
    denominators: Denominators
    num_sequences: int  # completions in the rows
    num_zero_advantage: int  # valid completions left out because their advantage is 0
    num_invalid: int  # completions left out as invalid
    row_tokens: int  # tokens in the rows, shared prompts counted once, padding not counted
    padded_tokens: int  # size of all rows
