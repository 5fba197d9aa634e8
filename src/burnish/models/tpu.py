"""What models compute on TPU with Pallas kernels instead of plain operations: packed attention, attention to caches,
and the experts' grouped matrix products.

Attention over packed rows is JAX's splash attention, whose blocks without a visible pair are skipped and whose masks
are computed in the kernel, so that nothing of T² is kept; grouped products are JAX's megablox. Attention to caches is a
kernel of our own, because the caches are (a prompt's columns shared by its completions, and a ring of each one's own).
Each function works on what one device holds, and mirrors the plain function that its docstring names. `interpret` runs
a kernel without a TPU.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.ops import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

from burnish.models.scoring import MASKED, Attend, Scoring

LANES = 128
"""The width of a TPU's vector registers: what blocks and head sizes are multiples of."""

SUBLANES = 8


def block_of(length: int, most: int = 512) -> int | None:
    """The largest block of columns that divides `length`; None where kernels have none."""
    return next((size for size in (512, 256, 128) if size <= most and length % size == 0), None)


MOST_COLUMNS = 2**15 - 1
"""Longest row of splash attention: the kernel gets two columns of a row in one 32-bit number."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplashPlan:
    """What queries see, as the kernel wants it. A query sees the keys of its segment that are in its prompt or, up to
    itself, in its own part of the row: its completion or, for a query of the prompt, the prompt."""

    segments: jax.Array  # (B, T) int32
    parts: jax.Array  # (B, T) int32, end of the query's prompt (0: it is in it) · 2^15 + begin of its own part
    blocks: jax.Array  # (B, J, J) bool, whether some query of a block sees a key of another; T/J is `block_of(T)`


def splash_plan(segments: jax.Array, branches: jax.Array, window: int | None) -> SplashPlan:
    """That of packed rows (B, T), T at most MOST_COLUMNS, `block_of(T)` not None; padding, segment 0, sees itself."""
    T = segments.shape[1]
    block = block_of(T)
    assert block is not None
    column = jnp.arange(T, dtype=jnp.int32)

    def one_row(segments: jax.Array, branches: jax.Array) -> SplashPlan:
        starts = (jnp.diff(segments, prepend=-1) != 0) | (jnp.diff(branches, prepend=-1) != 0) | (segments == 0)
        begin = jax.lax.cummax(jnp.where(starts, column, 0))
        # A completion's prompt is the last one before it.
        end = jnp.where(branches == 0, 0, jax.lax.cummax(jnp.where(branches == 0, column + 1, 0)))
        parts = end * 2**15 + begin
        sees = _Sees(block, window)

        def blocks_seen(i: jax.Array) -> jax.Array:  # (J,), of one block of queries
            rows = jax.lax.dynamic_slice_in_dim(column, i * block, block)[:, None]
            seen = sees.at(rows, parts[rows], column[None, :]) & (segments[rows] == segments[None, :])
            return seen.reshape(block, T // block, block).any(axis=(0, 2))

        return SplashPlan(segments, parts, jax.lax.map(blocks_seen, jnp.arange(T // block)))

    return jax.vmap(one_row)(segments, branches)


@dataclass(frozen=True)
class _Sees:
    """Whether queries see keys of their segment: as `mask_function` of splash attention for square blocks."""

    block: int
    window: int | None

    def at(self, query: jax.Array, parts: jax.Array, key: jax.Array) -> jax.Array:
        """By columns, and `parts` of the query."""
        end, begin = jax.lax.shift_right_logical(parts, 15) & MOST_COLUMNS, parts & MOST_COLUMNS
        of_prompt, own = key < end, (key >= begin) & (key <= query)
        if self.window is not None:
            own &= query - key < self.window
            of_prompt &= end - key + query - begin < self.window
        return of_prompt | own

    def __call__(self, parts: jax.Array, key: jax.Array) -> jax.Array:
        """Of one block. `parts` is negative where keys are rows and queries are columns, in the kernel whose grid has
        blocks of queries last."""
        number = jnp.where(parts < 0, pl.program_id(2), pl.program_id(1))
        # Of a square block both numbers add up to what is left when the key's is taken away.
        both = jax.lax.broadcasted_iota(jnp.int32, key.shape, 0) + jax.lax.broadcasted_iota(jnp.int32, key.shape, 1)
        query = number * self.block + both - key % self.block
        return self.at(query, parts, key)


def splash_attention(plan: SplashPlan, score: Scoring, window: int | None, *, interpret: bool = False) -> Attend:
    """`attention.plain_attention` by splash attention; the window is that of the plan, which is data, so that a row's
    filling compiles nothing anew."""
    J = plan.blocks.shape[1]
    block = plan.segments.shape[1] // J
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )

    def one_row(plan: SplashPlan, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        number = jnp.arange(J, dtype=jnp.int32)

        def info(of: jax.Array, parts: Any) -> splash.mask_info_lib.MaskInfo:
            # What is read ahead, in blocks; of those that are skipped always the same one.
            ahead = jnp.where(plan.blocks, of, 0).astype(jnp.int8 if J < 128 else jnp.int32)
            return splash.mask_info_lib.MaskInfo(ahead[None], None, plan.blocks[None].astype(jnp.int8), None, parts)

        by_query = info(number[None, :], plan.parts)
        kernel = splash.SplashAttentionKernel(
            by_query,
            by_query,
            info(number[:, None], plan.parts | jnp.int32(-(2**31))),
            block_sizes=sizes,
            is_mqa=False,
            save_residuals=False,
            mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=score.softcap,
            residual_checkpoint_name="attention",
            mask_function=_Sees(block, window),
            interpret=pltpu.InterpretParams() if interpret else False,
        )
        out: Any = kernel(q, k, v, splash.SegmentIds(plan.segments, plan.segments))
        return out

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        N = q.shape[-1]
        q = (q.astype(jnp.float32) * score.scale).astype(q.dtype)

        def heads_first(x: jax.Array) -> jax.Array:  # (B, T, K, N) -> (B, K, T, N padded)
            return jnp.pad(x.swapaxes(1, 2), [(0, 0)] * 3 + [(0, -N % LANES)])

        out = jax.vmap(one_row)(plan, heads_first(q), heads_first(k), heads_first(v))
        return out[..., :N].swapaxes(1, 2)

    return attend


class Partial(NamedTuple):
    """Softmax attention to some of the keys, to be combined with that to others."""

    mixed: jax.Array  # (X, K, Q, N) float32, sum of exp(score - peak) · value
    peak: jax.Array  # (X, K, Q) float32, the largest score; MASKED where nothing is seen
    total: jax.Array  # (X, K, Q) float32, sum of exp(score - peak)


def cache_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, score: Scoring, *, interpret: bool = False
) -> Partial:
    """Attention of queries to a cache, reading only the blocks of columns in which some query of the row sees one.

    q (X, K, Q, N); k (X, K, N, S); v (X, K, S, N); visible (X, 1 or Q, S) bool; `block_of(S)` not None.
    """
    X, K, Q, N = q.shape
    S = k.shape[3]
    block = block_of(S)
    assert block is not None
    J, rows = S // block, -(-Q // SUBLANES) * SUBLANES
    seen = visible.any(axis=1).reshape(X, J, block).any(axis=2)
    counts = seen.sum(axis=1).astype(jnp.int32)
    # Visible blocks first; after them the last one again, which is not fetched twice.
    order = jnp.argsort(~seen, axis=1, stable=True).astype(jnp.int32)
    turn = jnp.minimum(jnp.arange(J)[None], jnp.maximum(counts - 1, 0)[:, None])
    blocks = jnp.take_along_axis(order, turn, axis=1)
    masks = jnp.pad(visible.astype(jnp.int32), [(0, 0), (0, rows - Q if visible.shape[1] > 1 else 0), (0, 0)])

    def whole(x, k, j, blocks, counts):
        return x, k, 0, 0

    acc, top, total = pl.pallas_call(
        partial(_cache_kernel, score=score),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(X, K, J),
            in_specs=[
                pl.BlockSpec((None, None, rows, N), whole),
                pl.BlockSpec((None, None, N, block), lambda x, k, j, blocks, counts: (x, k, 0, blocks[x, j])),
                pl.BlockSpec((None, None, block, N), lambda x, k, j, blocks, counts: (x, k, blocks[x, j], 0)),
                pl.BlockSpec((None, masks.shape[1], block), lambda x, k, j, blocks, counts: (x, 0, blocks[x, j])),
            ],
            out_specs=[
                pl.BlockSpec((None, None, rows, N), whole),
                pl.BlockSpec((None, None, rows, LANES), whole),
                pl.BlockSpec((None, None, rows, LANES), whole),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((X, K, rows, N), jnp.float32),
            jax.ShapeDtypeStruct((X, K, rows, LANES), jnp.float32),
            jax.ShapeDtypeStruct((X, K, rows, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(blocks, counts, jnp.pad(q, [(0, 0), (0, 0), (0, rows - Q), (0, 0)]), k, v, masks)
    return Partial(acc[:, :, :Q], top[:, :, :Q, 0], total[:, :, :Q, 0])


def _cache_kernel(blocks, counts, q, k, v, mask, acc, top, total, *, score: Scoring):
    """One block of columns for the queries (rows, N) of one row and kv head; sums stay in VMEM over the blocks."""
    x, j = pl.program_id(0), pl.program_id(2)

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, MASKED)
        total[...] = jnp.zeros_like(total)

    @pl.when(j < counts[x])
    def _():
        scores = score(jnp.dot(q[...], k[...], preferred_element_type=jnp.float32))
        scores = jnp.where(mask[...] != 0, scores, MASKED)
        before = top[:, :1]
        peak = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - peak)
        shrink = jnp.exp(before - peak)
        mixed = jnp.dot(weights.astype(v.dtype), v[...], preferred_element_type=jnp.float32)
        acc[...] = shrink * acc[...] + mixed
        total[...] = jnp.broadcast_to(shrink * total[:, :1] + weights.sum(axis=1, keepdims=True), total.shape)
        top[...] = jnp.broadcast_to(peak, top.shape)


def grouped_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`jax.lax.ragged_dot` by megablox: rows (M, D) sorted by group, weights (E, D, F), sizes (E,) int32 -> (M, F).
    Rows beyond the groups give 0. Differentiable in reverse mode."""
    M, D = rows.shape
    F = weights.shape[2]
    tile = 512 if M >= 4096 else 128
    tiling = (tile, min(1024, -(-D // LANES) * LANES), min(1024, -(-F // LANES) * LANES))
    # The kernel leaves rows beyond the groups as they are in memory, there and back.
    grouped = (jnp.arange(M) < sizes.sum())[:, None]
    padded = jnp.pad(jnp.where(grouped, rows, 0), [(0, -M % tile), (0, 0)])
    out = gmm(padded, weights, sizes, rows.dtype, tiling, None, None, False, interpret)
    return jnp.where(grouped, out[:M], 0)
