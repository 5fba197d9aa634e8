"""Drawing one token per row from logits: temperature, top-k, top-p, min-p, one uniform number per row.

A random number per vocabulary entry (Gumbel) is the dearest part of a small model's decode step, so a row draws
one uniform number, which depends on its seed and token index alone, and inverts the cumulative distribution.
Small top-k goes through `lax.top_k`; everything else finds the cut as a threshold on the logits and inverts in
two levels.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burnish.rollout.types import SamplingParams

MAX_CANDIDATES = 64
"""top-k up to this size is cut by `lax.top_k`, whose time grows with k."""

_GROUP = 32  # vocabulary entries of which only the largest takes part in the first stage of top-k
_BLOCK = 256  # vocabulary entries summed at a time by the two-level inversion


class Way(Enum):
    """How a token is found. Part of what is compiled; all other sampling options are not."""

    CANDIDATES = "candidates"  # top-k up to MAX_CANDIDATES, greedy too
    WHOLE = "whole"  # no top-k, no top-p
    THRESHOLD = "threshold"  # all else


class Cuts(NamedTuple):
    """SamplingParams as device scalars. temperature is never 0: greedy is temperature 1 with top_k 1."""

    temperature: Any  # () float32
    top_k: Any  # () int32, 1..V; V cuts nothing
    top_p: Any  # () float32
    min_p: Any  # () float32


def cuts_from(sampling: SamplingParams, vocab_size: int) -> tuple[Cuts, Way]:
    greedy = sampling.temperature == 0
    top_k = 1 if greedy else min(sampling.top_k or vocab_size, vocab_size)
    cuts = Cuts(
        temperature=np.float32(1.0 if greedy else sampling.temperature),
        top_k=np.int32(top_k),
        top_p=np.float32(sampling.top_p),
        min_p=np.float32(sampling.min_p),
    )
    if top_k <= MAX_CANDIDATES:
        return cuts, Way.CANDIDATES
    return cuts, Way.WHOLE if top_k == vocab_size and sampling.top_p >= 1 else Way.THRESHOLD


def uniforms(seed: int, count: int) -> np.ndarray:
    """The uniform numbers of a completion's first `count` tokens, (count,) float32 in [0, 1): a function of the seed
    (any integer, modulo 2**64) and the token index alone.

    Made on the host by Philox (Salmon et al. 2011), whose raw stream NumPy promises to keep: there are few of them,
    and a generator in the decode step would take a good part of its compilation.
    """
    bits = np.random.Philox(key=seed % 2**64).random_raw(count)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def sample(logits: jax.Array, uniforms: jax.Array, cuts: Cuts, way: Way) -> tuple[jax.Array, jax.Array]:
    """logits (B, V) float32, uniforms (B,) in [0, 1) -> tokens (B,) int32, logprobs (B,) float32.

    The order of cuts is that of transformers: temperature, top-k, top-p among what top-k kept (the token that
    crosses p is kept), then min-p (probability below min_p times the largest). Logprobs are of the
    distribution at `temperature` before any cut. Of equal logits at the top-k border, up to MAX_CANDIDATES
    the lowest ids are kept, above it all of them.
    """
    scaled = logits / cuts.temperature
    find = {Way.CANDIDATES: _by_candidates, Way.WHOLE: _from_whole, Way.THRESHOLD: _by_threshold}[way]
    tokens = find(scaled, uniforms, cuts)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(scaled, axis=1)


def _invert(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """First index at which the running sum of weights (B, n) exceeds uniforms (B,) times the total: (B,)
    int32.

    Where rounding lets no sum exceed it, the last index with weight.
    """
    sums = jnp.cumsum(weights, axis=1)
    index = jnp.sum(sums <= uniforms[:, None] * sums[:, -1:], axis=1)
    return jnp.minimum(index, _last_positive(weights))


def _last_positive(weights: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(weights > 0, jnp.arange(weights.shape[1]), 0), axis=1)


def _by_candidates(scaled: jax.Array, uniforms: jax.Array, cuts: Cuts) -> jax.Array:
    count = min(MAX_CANDIDATES, scaled.shape[1])
    values, ids = _top_k(scaled, count)
    weights = jnp.where(jnp.arange(count) < cuts.top_k, jnp.exp(values - values[:, :1]), 0.0)
    before = jnp.cumsum(weights, axis=1) - weights
    keep = (before < cuts.top_p * weights.sum(axis=1, keepdims=True)) & (weights >= cuts.min_p)
    keep = keep | (jnp.arange(count) == 0)
    index = _invert(jnp.where(keep, weights, 0.0), uniforms)
    return jnp.take_along_axis(ids, index[:, None], axis=1)[:, 0]


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of x (B, V), in two stages where V is wide: the k largest lie in the k groups of largest maximum."""
    B, V = x.shape
    if 4 * k * _GROUP > V:
        return _sealed_top_k(x, k)
    groups = jnp.pad(x, ((0, 0), (0, -V % _GROUP)), constant_values=-jnp.inf).reshape(B, -1, _GROUP)
    _, best = _sealed_top_k(groups.max(axis=2), k)
    candidates = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(B, k * _GROUP)
    values, places = _sealed_top_k(candidates, k)
    return values, jnp.take_along_axis(best, places // _GROUP, axis=1) * _GROUP + places % _GROUP


def _sealed_top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` behind a barrier: with later slices merged into its own, XLA would sort whole rows."""
    values, ids = lax.top_k(x, k)
    # In the other order: as it is, XLA's compiler for several CPU devices takes top_k and barrier for one, and crashes.
    ids, values = lax.optimization_barrier((ids, values))
    return values, ids


def _from_whole(scaled: jax.Array, uniforms: jax.Array, cuts: Cuts) -> jax.Array:
    weights = jnp.exp(scaled - scaled.max(axis=1, keepdims=True))
    return _invert_in_blocks(jnp.where(weights >= cuts.min_p, weights, 0.0), uniforms)


def _by_threshold(scaled: jax.Array, uniforms: jax.Array, cuts: Cuts) -> jax.Array:
    weights = jnp.exp(scaled - scaled.max(axis=1, keepdims=True))
    order = _sortable(scaled)
    # A token is kept by top-k when fewer than k are above it, by top-p when those above it weigh less than p.
    floor = _lowest(lambda t: jnp.sum(order > t, axis=1) < cuts.top_k, scaled.shape[0])
    weights = jnp.where(order >= floor[:, None], weights, 0.0)
    mass = cuts.top_p * weights.sum(axis=1)
    floor = lax.cond(
        cuts.top_p < 1,
        lambda: _lowest(lambda t: jnp.sum(jnp.where(order > t, weights, 0.0), axis=1) < mass, scaled.shape[0]),
        lambda: floor,
    )
    keep = (order >= floor[:, None]) & (weights >= cuts.min_p)
    return _invert_in_blocks(jnp.where(keep, weights, 0.0), uniforms)


def _sortable(x: jax.Array) -> jax.Array:
    """float32 -> int32 in the same order, so that bisection ends after 32 halvings at the exact value."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _lowest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The lowest int32 t of each row for which `holds(t (B, 1)) -> (B,) bool` is true; it is true from there
    on."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # false at low (or low is the least value), true at high
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        true = holds(middle[:, None])
        return jnp.where(true, low, middle), jnp.where(true, middle, high)

    info = jnp.iinfo(jnp.int32)
    start = (jnp.full(rows, info.min, jnp.int32), jnp.full(rows, info.max, jnp.int32))
    return lax.fori_loop(0, 32, halve, start)[1]


def _invert_in_blocks(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """`_invert` over a wide row: pick a block by the blocks' sums, then a token within it."""
    B, V = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -V % _BLOCK))).reshape(B, -1, _BLOCK)
    sums = blocks.sum(axis=2)
    block = _invert(sums, uniforms)
    ends = jnp.cumsum(sums, axis=1)
    start = jnp.take_along_axis(ends - sums, block[:, None], axis=1)[:, 0]
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    rest = jnp.maximum(uniforms * ends[:, -1] - start, 0.0)  # below 0 by rounding: would pick no weight
    index = jnp.sum(jnp.cumsum(inside, axis=1) <= rest[:, None], axis=1)
    return block * _BLOCK + jnp.minimum(index, _last_positive(inside))
