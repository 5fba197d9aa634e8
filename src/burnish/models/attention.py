"""Attention over packed rows, for training and prefill: work and memory follow what is visible, not T².

Long rows are cut into blocks, and only pairs of a query block and a key block with something to see are computed,
with an online softmax and a backward pass that recomputes probabilities (Dao et al. 2022, arXiv:2205.14135). Which
pairs those are is data, so one compiled program serves every filling. Short rows take the plain path. Grouped-query
heads are never repeated in memory: the H/K query heads of a kv head are folded into its batch of queries. Masked
scores are a large negative finite number, so a row that sees nothing stays finite.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from burnish.models import tpu
from burnish.models.scoring import MASKED, Attend, Scoring, scoring
from burnish.models.spec import ModelSpec
from burnish.parallel.mesh import platform
from burnish.parallel.rules import Part, per_device

BLOCK = 128
"""Tokens of a block: large enough for full matrix speed, small enough that few blocks are partly visible."""

PLAIN_UP_TO = 256
"""Rows up to this length are computed whole."""


def visibility(segments: jax.Array, branches: jax.Array, positions: jax.Array, window: int | None) -> jax.Array:
    """(B, T) segments, branches and positions -> (B, T, T) bool, True where query t (axis 1) may see key s (axis 2).

    With a window, t sees its own and the window - 1 positions before it: positions are counted in a sequence, so a
    completion's window reaches back into the prompt it shares.
    """
    T = segments.shape[1]
    same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] != 0)
    branch = (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    visible = same & branch & jnp.tril(jnp.ones((T, T), bool))
    return visible if window is None else visible & (positions[:, :, None] - positions[:, None, :] < window)


def packed_attention(spec: ModelSpec, segments: jax.Array, branches: jax.Array, positions: jax.Array) -> Attend:
    """The `attend` of packed rows: (q (B,T,H,N), k (B,T,K,N), v (B,T,K,N)) -> (B,T,H,N), softmax in float32.

    `spec` is that of one kind of layer. Differentiable in reverse mode. Results at padding are finite and
    meaningless.
    """
    T = segments.shape[1]
    block = next((size for size in (BLOCK, BLOCK // 2) if T % size == 0), None)
    score = scoring(spec)
    kernel = platform() == "tpu" and tpu.block_of(T) is not None and T <= tpu.MOST_COLUMNS
    blocked = None if kernel or T <= PLAIN_UP_TO else block

    def see(part: Part, segments: jax.Array, branches: jax.Array, positions: jax.Array) -> Any:
        if kernel:
            return tpu.splash_plan(segments, branches, spec.window)
        visible = visibility(segments, branches, positions, spec.window)
        return visible if blocked is None else block_plan(visible, blocked)

    # Once for all layers; on a mesh a device knows only its own rows.
    rows = ("batch",)
    seen = per_device(see, [rows] * 3, rows)(segments, branches, positions)
    leaves, treedef = jax.tree.flatten(seen)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def on_part(part: Part, q: jax.Array, k: jax.Array, v: jax.Array, *leaves: jax.Array) -> jax.Array:
            k, v = own_kv_heads(part, q, k, v, spec)
            seen = jax.tree.unflatten(treedef, leaves)
            if kernel:
                return tpu.splash_attention(seen, score, spec.window)(q, k, v)
            way = plain_attention if blocked is None else block_attention
            return way(seen, score)(q, k, v)

        heads, kv_heads = ("batch", "length", "heads"), ("batch", "length", "kv_heads")
        axes = [heads, kv_heads, kv_heads, *([rows] * len(leaves))]
        return per_device(on_part, axes, heads, checked=False)(q, k, v, *leaves)

    return attend


def own_kv_heads(part: Part, q: jax.Array, k: jax.Array, v: jax.Array, spec: ModelSpec) -> tuple[jax.Array, jax.Array]:
    """Of keys and values (…, K, N) the heads that the query heads (…, H, N) of this part of a mesh attend to. All,
    unless query heads are split over more devices than there are kv heads."""
    if not part.is_split("heads") or part.is_split("kv_heads"):
        return k, v
    per_kv_head = spec.num_heads // spec.num_kv_heads
    first = part.index("heads") * q.shape[-2] // per_kv_head
    count = max(1, q.shape[-2] // per_kv_head)
    return tuple(jax.lax.dynamic_slice_in_dim(x, first, count, axis=-2) for x in (k, v))  # type: ignore[return-value]


def plain_attention(visible: jax.Array, score: Scoring) -> Attend:
    """`packed_attention` with all T² scores; visible (B, T, T) bool."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        B, T, H, N = q.shape
        K = k.shape[2]
        grouped = q.reshape(B, T, K, H // K, N)
        scores = score(jnp.einsum("btkrn,bskn->bkrts", grouped, k, preferred_element_type=jnp.float32))
        scores = jnp.where(visible[:, None, None], scores, MASKED)
        probs = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bkrts,bskn->btkrn", probs, v).reshape(B, T, H, N)

    return attend


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPlan:
    """What each of the Q = B·T/block query blocks sees. All rows are laid end to end; J = T/block."""

    mask: jax.Array  # (Q, J, block, block) bool, by key block of the same row
    keys: jax.Array  # (Q, J) int32, the visible key blocks first: their numbers among all Q
    counts: jax.Array  # (Q,) int32, how many of them are visible


def block_plan(visible: jax.Array, block: int) -> BlockPlan:
    """Which key blocks each query block must look at: those with at least one visible pair of tokens."""
    B, T, _ = visible.shape
    J = T // block
    mask = visible.reshape(B, J, block, J, block).swapaxes(2, 3)
    seen = mask.any(axis=(3, 4))
    order = jnp.argsort(~seen, axis=-1, stable=True)
    mask = jnp.take_along_axis(mask, order[..., None, None], axis=2)
    keys = order + J * jnp.arange(B)[:, None, None]
    return BlockPlan(
        mask.reshape(B * J, J, block, block),
        keys.reshape(B * J, J).astype(jnp.int32),
        seen.sum(axis=-1).reshape(B * J).astype(jnp.int32),
    )


def block_attention(plan: BlockPlan, score: Scoring) -> Attend:
    """`packed_attention` over the visible blocks only."""
    block = plan.mask.shape[-1]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        B, T, H, N = q.shape
        K = k.shape[2]
        Q, R = B * T // block, H // K

        def blocks(x: jax.Array) -> jax.Array:  # (B, T, K, N) -> (Q, K, block, N)
            return x.reshape(Q, block, K, N).swapaxes(1, 2)

        queries = q.reshape(Q, block, K, R, N).transpose(0, 2, 3, 1, 4).reshape(Q, K, R * block, N)
        out = _attend_blocks(score, queries, blocks(k), blocks(v), plan)
        return out.reshape(Q, K, R, block, N).transpose(0, 3, 1, 2, 4).reshape(B, T, H, N)

    return attend


def _chunk(num_blocks: int) -> int:
    """How many query blocks are worked on at once: a divisor of their number, up to 8, for long batches of
    products; no more, because all of them take as many turns as the one that sees most."""
    return max(c for c in range(1, 9) if num_blocks % c == 0)


def _scores(score: Scoring, q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
    """q (C, K, R·b, N), k (C, K, b, N), mask (C, b, b) -> (C, K, R·b, b) float32, scaled, capped and masked."""
    C, K, rows, _ = q.shape
    b = k.shape[2]
    scores = score(jnp.einsum("ckqn,cksn->ckqs", q, k, preferred_element_type=jnp.float32))
    scores = jnp.where(mask[:, None, None], scores.reshape(C, K, rows // b, b, b), MASKED)
    return scores.reshape(C, K, rows, b)


def _turn(plan: BlockPlan, chunk: int, c: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The j-th visible key block of each query block of chunk c: (chunk,) numbers, (chunk, b, b) masks."""
    mask = jax.lax.dynamic_slice_in_dim(plan.mask, c * chunk, chunk)
    keys = jax.lax.dynamic_slice_in_dim(plan.keys, c * chunk, chunk)
    counts = jax.lax.dynamic_slice_in_dim(plan.counts, c * chunk, chunk)
    mask = jax.lax.dynamic_index_in_dim(mask, j, axis=1, keepdims=False)
    keys = jax.lax.dynamic_index_in_dim(keys, j, axis=1, keepdims=False)
    return keys, mask & (j < counts)[:, None, None]


def _turns(plan: BlockPlan, chunk: int, c: jax.Array) -> jax.Array:
    return jnp.max(jax.lax.dynamic_slice_in_dim(plan.counts, c * chunk, chunk))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_blocks(score: Scoring, q: jax.Array, k: jax.Array, v: jax.Array, plan: BlockPlan) -> jax.Array:
    """q (Q, K, R·b, N), k, v (Q, K, b, N) -> (Q, K, R·b, N)."""
    return _attend_blocks_fwd(score, q, k, v, plan)[0]


def _attend_blocks_fwd(score, q, k, v, plan):
    Q, K, rows, N = q.shape
    chunk = _chunk(Q)

    def one_chunk(c, carry):
        out, lse = carry
        q_c = jax.lax.dynamic_slice_in_dim(q, c * chunk, chunk)

        def turn(j, carry):
            top, total, acc = carry
            keys, mask = _turn(plan, chunk, c, j)
            scores = _scores(score, q_c, k[keys], mask)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            probs = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            total = shrink * total + probs.sum(axis=-1)
            values = jnp.einsum("ckqs,cksn->ckqn", probs.astype(v.dtype), v[keys], preferred_element_type=jnp.float32)
            return new_top, total, shrink[..., None] * acc + values

        start = (
            jnp.full((chunk, K, rows), MASKED, jnp.float32),
            jnp.zeros((chunk, K, rows), jnp.float32),
            jnp.zeros((chunk, K, rows, N), jnp.float32),
        )
        top, total, acc = jax.lax.fori_loop(0, _turns(plan, chunk, c), turn, start)
        total = jnp.maximum(total, 1e-30)
        out = jax.lax.dynamic_update_slice_in_dim(out, (acc / total[..., None]).astype(q.dtype), c * chunk, 0)
        return out, jax.lax.dynamic_update_slice_in_dim(lse, top + jnp.log(total), c * chunk, 0)

    start = (jnp.zeros_like(q), jnp.zeros((Q, K, rows), jnp.float32))
    out, lse = jax.lax.fori_loop(0, Q // chunk, one_chunk, start)
    out, lse = checkpoint_name(out, "attention"), checkpoint_name(lse, "attention")
    return out, (q, k, v, plan, out, lse)


def _attend_blocks_bwd(score, residuals, d_out):
    q, k, v, plan, out, lse = residuals
    Q = q.shape[0]
    chunk = _chunk(Q)
    inner = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def one_chunk(c, carry):
        d_q, d_k, d_v = carry
        q_c, d_out_c, lse_c, inner_c = (
            jax.lax.dynamic_slice_in_dim(x, c * chunk, chunk) for x in (q, d_out, lse, inner)
        )

        def turn(j, carry):
            d_q_c, d_k, d_v = carry
            keys, mask = _turn(plan, chunk, c, j)
            k_j, v_j = k[keys], v[keys]
            scores = _scores(score, q_c, k_j, mask)
            probs = jnp.exp(scores - lse_c[..., None])
            d_probs = jnp.einsum("ckqn,cksn->ckqs", d_out_c, v_j, preferred_element_type=jnp.float32)
            d_scores = score.scale * probs * (d_probs - inner_c[..., None])
            if score.softcap is not None:  # masked scores are far outside the cap, but their probs are 0
                d_scores = d_scores * (1 - jnp.square(jnp.clip(scores / score.softcap, -1, 1)))
            d_scores = d_scores.astype(q.dtype)
            probs = probs.astype(q.dtype)
            f32 = partial(jnp.einsum, preferred_element_type=jnp.float32)
            d_q_c = d_q_c + f32("ckqs,cksn->ckqn", d_scores, k_j)
            d_k_j = f32("ckqs,ckqn->cksn", d_scores, q_c)
            d_v_j = f32("ckqs,ckqn->cksn", probs, d_out_c)
            # Query blocks may share a key block, so the sums are taken one after the other.
            for i in range(chunk):
                d_k = d_k.at[keys[i]].add(d_k_j[i])
                d_v = d_v.at[keys[i]].add(d_v_j[i])
            return d_q_c, d_k, d_v

        start = (jnp.zeros(q_c.shape, jnp.float32), d_k, d_v)
        d_q_c, d_k, d_v = jax.lax.fori_loop(0, _turns(plan, chunk, c), turn, start)
        return jax.lax.dynamic_update_slice_in_dim(d_q, d_q_c.astype(q.dtype), c * chunk, 0), d_k, d_v

    start = (jnp.zeros_like(q), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    d_q, d_k, d_v = jax.lax.fori_loop(0, Q // chunk, one_chunk, start)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend_blocks.defvjp(_attend_blocks_fwd, _attend_blocks_bwd)
