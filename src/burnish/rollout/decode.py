"""What the engine runs on the device: prefill of prompts, chunks of decode steps, and moves of cached
keys/values.

A decode batch is a grid of R lanes with W slots each (B = R·W rows, row = lane·W + slot). A lane holds the
keys and values of one prompt, all but its last token, shared by its slots; a row's own cache begins with the
prompt's last token. All rows write at the same column of their caches, a ring: a row of age a sees the a + 1
newest columns. So an update is one slice per layer, and a refilled slot needs no clearing. Layers are
unrolled over separate arrays: scanning stacked ones copies every weight and cache on CPU. Every function
compiles once per shape.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burnish.models import decoder
from burnish.models.attention import MASKED, Attend, Scoring, scoring
from burnish.models.params import Params, layers_of
from burnish.models.spec import ModelSpec, per_kind
from burnish.rollout.sampling import Cuts, Way, sample

CHUNK = 16
"""Most decode steps in one call: a row that stops early idles for the rest of its chunk."""

compilations: Counter[str] = Counter()
"""How often each function of this module was compiled."""


P = ParamSpec("P")
R = TypeVar("R")


def _counted(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        compilations[function.__name__] += 1  # runs only while jax traces: once per shape
        return function(*args, **kwargs)

    return traced


class LayerCache(NamedTuple):
    """Keys and values of one layer for X lanes or rows and S columns. Keys have their columns last: that is
    what the product with queries reads fastest on CPU."""

    k: jax.Array  # (X, K, N, S)
    v: jax.Array  # (X, K, S, N)


class Seen(NamedTuple):
    """Which columns the rows of a decode step see in layers of one kind."""

    lane: jax.Array  # (R, S) bool, the same for a lane's slots; with a window (R, W, S)
    own: jax.Array  # (B, T) bool


class Rows(NamedTuple):
    """The state of the B rows at the start of a chunk."""

    tokens: Any  # (B,) int32, sampled (or the prompt's last token) but not yet read by the model
    positions: Any  # (B,) int32, of `tokens` in prompt + completion
    ages: Any  # (B,) int32, tokens in the row's own cache
    active: Any  # (B,) bool
    remaining: Any  # (B,) int32, completion tokens at most from here on


class Chunk(NamedTuple):
    """What a chunk sampled: row b's tokens are the first `emitted[b]` of its line."""

    tokens: jax.Array  # (B, CHUNK) int32
    logprobs: jax.Array  # (B, CHUNK) float32
    emitted: jax.Array  # (B,) int32
    active: jax.Array  # (B,) bool, neither stopped nor at its limit
    steps: jax.Array  # () int32, columns written


@partial(jax.jit, static_argnames="dtype")
@_counted
def _layer_of(stacked: Params, index: jax.Array, dtype: Any) -> Params:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False).astype(dtype), stacked)


def _copied(tree: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda a: jnp.array(a, dtype, copy=True), tree)


def decode_view(spec: ModelSpec, params: Params, dtype: Any) -> Params:
    """The trainer's tree as decoding reads it: one dict of arrays per layer, in the compute dtype. Always copies,
    because the trainer gives its own arrays away to its next update."""
    params = jax.tree.map(jnp.asarray, params)
    layers = [
        _copied(held, dtype) if index is None else _layer_of(held, np.int32(index), dtype=dtype)
        for held, index in layers_of(spec, params)
    ]
    rest = {name: _copied(a, dtype) for name, a in params.items() if name not in ("layers", "tail")}
    return {**rest, "layers": layers}


def empty_caches(spec: ModelSpec, num: int, columns: int, dtype: Any) -> list[LayerCache]:
    """Zeroed caches of all layers for `num` lanes or rows."""

    def of(kind: ModelSpec) -> LayerCache:
        K, N = kind.num_kv_heads, kind.head_dim
        return LayerCache(jnp.zeros((num, K, N, columns), dtype), jnp.zeros((num, K, columns, N), dtype))

    return [of(spec.at(i)) for i in range(spec.num_layers)]


@partial(jax.jit, static_argnames=("spec", "dtype"))
@_counted
def prefill(spec: ModelSpec, view: Params, tokens: jax.Array, lengths: jax.Array, dtype: Any) -> list[LayerCache]:
    """Keys and values of prompts: tokens (P, S) int32, padded on the right, lengths (P,) int32."""
    P, S = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(S), (P, S))
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    size = len(spec.pattern)
    tables = decoder.ropes(spec, positions)
    attends = decoder.packed_attends(spec, segments, jnp.zeros_like(segments), positions)
    caches: list[LayerCache] = []
    x = decoder.embed(spec, view, tokens, dtype)
    for i, p in enumerate(view["layers"]):

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, packed: Attend = attends[i % size]) -> jax.Array:
            caches.append(LayerCache(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)))
            return packed(q, k, v)

        x, _ = decoder.layer(spec.at(i), p, x, tables[i % size], attend)
    return caches


@partial(jax.jit, donate_argnames="lanes")
@_counted
def insert(lanes: LayerCache, prompts: LayerCache, sources: jax.Array) -> LayerCache:
    """Overwrite the lanes (R, …, S) whose `sources` (R,) int32 is not -1 with that row of `prompts` (P, …, S'
    ≤ S). One layer at a time: the compiled function is small and little is held twice."""

    def merged(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        new = jnp.take(new, jnp.maximum(sources, 0), axis=0)
        pad = [(0, old.shape[a] - new.shape[a] if a == axis else 0) for a in range(4)]
        return jnp.where(sources[:, None, None, None] >= 0, jnp.pad(new, pad), old)

    return LayerCache(merged(lanes.k, prompts.k, 3), merged(lanes.v, prompts.v, 2))


@partial(jax.jit, static_argnames="columns")
@_counted
def relocate(cache: LayerCache, sources: jax.Array, shift: jax.Array, columns: int) -> LayerCache:
    """The lanes or rows `sources` of a cache, its columns rolled left by `shift`, then padded to
    `columns`."""

    def moved(a: jax.Array, axis: int) -> jax.Array:
        a = jnp.roll(jnp.take(a, sources, axis=0), -shift, axis=axis)
        return jnp.pad(a, [(0, columns - a.shape[axis] if i == axis else 0) for i in range(4)])

    return LayerCache(moved(cache.k, 3), moved(cache.v, 2))


def _attend(lane: LayerCache, own: LayerCache, q: jax.Array, seen: Seen, score: Scoring) -> jax.Array:
    """Softmax attention of q (B, H, N) over its lane's columns and its own, as one distribution: (B, H, N).

    The queries of a lane's slots are folded into one matrix per kv head.
    """
    B, H, N = q.shape
    R, K = lane.k.shape[:2]
    W, rep = B // R, H // K

    def by_lane(x: jax.Array) -> jax.Array:  # (B, K, rep, …) -> (R, K, W·rep, …)
        x = jnp.moveaxis(x.reshape(R, W, K, rep, *x.shape[3:]), 1, 2)
        return x.reshape(R, K, W * rep, *x.shape[4:])

    def by_row(x: jax.Array) -> jax.Array:  # the inverse
        x = jnp.moveaxis(x.reshape(R, K, W, rep, *x.shape[3:]), 2, 1)
        return x.reshape(B, K, rep, *x.shape[4:])

    grouped = q.reshape(B, K, rep, N)

    def scores(queries: jax.Array, keys: jax.Array, visible: jax.Array) -> jax.Array:
        s = score(jnp.einsum("xkqn,xkns->xkqs", queries, keys, preferred_element_type=jnp.float32))
        return jnp.where(visible, s, MASKED)

    lane_visible = seen.lane[:, None, None]
    if seen.lane.ndim == 3:  # (R, W, S) -> (R, 1, W·rep, S), the order of by_lane
        lane_visible = jnp.repeat(seen.lane, rep, axis=1)[:, None]
    lane_scores = scores(by_lane(grouped), lane.k, lane_visible)
    own_scores = scores(grouped, own.k, seen.own[:, None, None])
    peak = jnp.maximum(by_row(lane_scores.max(axis=-1)), own_scores.max(axis=-1))  # (B, K, rep)
    lane_weights = jnp.exp(lane_scores - by_lane(peak)[..., None])
    own_weights = jnp.exp(own_scores - peak[..., None])
    total = by_row(lane_weights.sum(axis=-1)) + own_weights.sum(axis=-1)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        weights = weights.astype(values.dtype)
        return jnp.einsum("xkqs,xksn->xkqn", weights, values, preferred_element_type=jnp.float32)

    mixed = by_row(mix(lane_weights, lane.v)) + mix(own_weights, own.v)
    return (mixed / total[..., None]).astype(q.dtype).reshape(B, H, N)


def _step(
    spec: ModelSpec,
    view: Params,
    lanes: list[LayerCache],
    own: list[LayerCache],
    lane_visible: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    ages: jax.Array,
    column: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, list[LayerCache]]:
    """One token per row through the model: logits (B, V) float32 and the caches with `column` written."""
    columns = own[0].k.shape[3]
    distance = (column - jnp.arange(columns)) % columns
    own_visible = distance[None] <= ages[:, None]

    def seen_in(kind: ModelSpec) -> Seen:
        if kind.window is None:
            return Seen(lane_visible, own_visible)
        R, S = lane_visible.shape
        near = positions.reshape(R, -1, 1) - jnp.arange(S) < kind.window
        return Seen(lane_visible[:, None] & near, own_visible & (distance < kind.window))

    size = len(spec.pattern)
    seen = per_kind(spec, lambda kind: kind.window, seen_in)
    scores = [scoring(spec.at(i)) for i in range(size)]
    tables = decoder.ropes(spec, positions)
    written: list[LayerCache] = []
    x = decoder.embed(spec, view, tokens, dtype)
    for i, (p, lane, old) in enumerate(zip(view["layers"], lanes, own, strict=True)):
        kind = spec.at(i)

        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            lane: LayerCache = lane,
            old: LayerCache = old,
            seen: Seen = seen[i % size],
            score: Scoring = scores[i % size],
        ) -> jax.Array:
            new = LayerCache(
                lax.dynamic_update_slice_in_dim(old.k, k[..., None], column, axis=3),
                lax.dynamic_update_slice_in_dim(old.v, v[:, :, None], column, axis=2),
            )
            written.append(new)
            return _attend(lane, new, q, seen, score)

        x, _ = decoder.layer(kind, p, x, tables[i % size], attend)
    x = decoder.norm(spec, x, view["final_norm"])
    return decoder.unembed(spec, view, x), written


@partial(jax.jit, static_argnames=("spec", "way", "dtype"), donate_argnames="own")
@_counted
def decode_chunk(
    spec: ModelSpec,
    view: Params,
    lanes: list[LayerCache],
    lane_lengths: jax.Array,
    own: list[LayerCache],
    rows: Rows,
    uniforms: jax.Array,
    column: jax.Array,
    num_steps: jax.Array,
    stop_ids: jax.Array,
    cuts: Cuts,
    way: Way,
    dtype: Any,
) -> tuple[Chunk, list[LayerCache]]:
    """Sample up to `num_steps` () int32 ≤ CHUNK tokens in every active row, ending early when no row is
    active.

    lanes: caches of R prompts, lane_lengths (R,) int32 of them; own: caches of the B rows, the first write at
    `column` () int32; uniforms (B, CHUNK) float32, one per token; stop_ids (E,) int32, -1 matches nothing.
    """
    B = rows.tokens.shape[0]
    columns = own[0].k.shape[3]
    lane_visible = jnp.arange(lanes[0].k.shape[3]) < lane_lengths[:, None]

    def body(carry: tuple) -> tuple:
        tokens, chunk, own = carry
        i = chunk.steps
        logits, own = _step(
            spec, view, lanes, own, lane_visible,
            tokens, rows.positions + i, rows.ages + i, (column + i) % columns, dtype,
        )  # fmt: skip
        tokens, logprobs = sample(logits, uniforms[:, i], cuts, way)
        emitted = chunk.emitted + chunk.active
        stopped = (tokens[:, None] == stop_ids).any(axis=1) | (emitted >= rows.remaining)
        chunk = Chunk(
            lax.dynamic_update_slice_in_dim(chunk.tokens, tokens[:, None], i, axis=1),
            lax.dynamic_update_slice_in_dim(chunk.logprobs, logprobs[:, None], i, axis=1),
            emitted,
            chunk.active & ~stopped,
            i + 1,
        )
        return tokens, chunk, own

    def unfinished(carry: tuple) -> jax.Array:
        _, chunk, _ = carry
        return (chunk.steps < num_steps) & chunk.active.any()

    chunk = Chunk(
        jnp.zeros((B, CHUNK), jnp.int32),
        jnp.zeros((B, CHUNK), jnp.float32),
        jnp.zeros(B, jnp.int32),
        jnp.asarray(rows.active),
        jnp.int32(0),
    )
    _, chunk, own = lax.while_loop(unfinished, body, (jnp.asarray(rows.tokens), chunk, own))
    return chunk, own
