"""What the engine runs on the device: prefill of prompts, chunks of decode steps, and moves of cached
keys/values.

A decode batch is a grid of R lanes with W slots each (B = R·W rows, row = lane·W + slot). A lane holds the
keys and values of one prompt, all but its last token, shared by its slots; a row's own cache begins with the
prompt's last token. All rows write at the same column of their caches, a ring: a row of age a sees the a + 1
newest columns. So an update is one slice per layer, and a refilled slot needs no clearing. Layers are
unrolled over separate arrays: scanning stacked ones copies every weight and cache on CPU. Every function
compiles once per shape.

On a mesh, lanes and their rows are split as a batch is, and caches by kv heads too, of which there are then at least
as many as devices along `tensor`. Rows stay on their devices, so that only activations are ever exchanged.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from burnish.models import decoder
from burnish.models.attention import MASKED, Attend, Scoring, scoring
from burnish.models.params import ParamInfo, Params, layer_infos, layer_place, param_infos
from burnish.models.spec import ModelSpec, per_kind
from burnish.parallel import rules, transfer
from burnish.parallel.transfer import Piece, Transfer
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


def check_fits(spec: ModelSpec, mesh: Mesh) -> None:
    """Raises MeshError where the model can not be split over the mesh."""
    for infos in (param_infos(spec), *(layer_infos(spec.at(i)) for i in range(len(spec.pattern)))):
        for info in jax.tree.leaves(infos, is_leaf=lambda x: isinstance(x, ParamInfo)):
            rules.partition(info.axes, info.shape, mesh)


def decode_view(
    spec: ModelSpec, params: Params, mesh: Mesh, dtype: Any, version: int, chunk_size: int | None
) -> tuple[Params, Transfer | None]:
    """The trainer's tree as decoding reads it: one dict of arrays per layer, in the compute dtype, split over `mesh`.
    Always copies, because the trainer gives its own arrays away to its next update. From other devices `chunk_size`
    arrays are moved at a time; the second result then says what was moved."""
    groups = [_layer_pieces(spec, params, i, mesh) for i in range(spec.num_layers)]
    infos = param_infos(spec)
    rest = {name: a for name, a in params.items() if name not in ("layers", "tail")}
    groups.append([Piece(n, a, None, rules.sharding(infos[n].axes, infos[n].shape, mesh)) for n, a in rest.items()])
    if transfer.same_devices(mesh, params):
        # A layer at a time: the compiled function is small, and the same for all layers of a kind.
        moved, report = [transfer.relaid(group, dtype) for group in groups], None
    else:
        by_name, report = transfer.send([p for group in groups for p in group], dtype, version, chunk_size)
        moved = [[by_name[piece.name] for piece in group] for group in groups]
    *layers, last = (
        {piece.name.rpartition("/")[2]: x for piece, x in zip(group, arrays, strict=True)}
        for group, arrays in zip(groups, moved, strict=True)
    )
    return {**last, "layers": layers}, report


def _layer_pieces(spec: ModelSpec, params: Params, layer: int, mesh: Mesh) -> list[Piece]:
    place = layer_place(spec, layer)
    held = params
    for key in place.path:
        held = held[key]
    return [
        Piece(f"layers/{layer}/{name}", held[name], place.index, rules.sharding(info.axes, info.shape, mesh))
        for name, info in layer_infos(spec.at(layer)).items()
    ]


CACHE_AXES = ("batch", "kv_heads", None, None)


def cache_heads(kind: ModelSpec, mesh_sizes: Mapping[str, int]) -> int:
    """Kv heads of the caches of one kind of layer: each is repeated until every device along `tensor` has as many."""
    return math.lcm(kind.num_kv_heads, mesh_sizes["tensor"])


def empty_caches(spec: ModelSpec, num: int, columns: int, dtype: Any, mesh: Mesh) -> list[LayerCache]:
    """Zeroed caches of all layers for `num` lanes or rows."""

    def of(kind: ModelSpec) -> LayerCache:
        K, N = cache_heads(kind, mesh.shape), kind.head_dim
        shapes = (num, K, N, columns), (num, K, columns, N)
        return LayerCache(*(jnp.zeros(x, dtype, device=rules.sharding(CACHE_AXES, x, mesh)) for x in shapes))

    return [of(spec.at(i)) for i in range(spec.num_layers)]


def _as_cached(kind: ModelSpec, x: jax.Array) -> jax.Array:
    """Keys or values (…, K, N) with the heads of the caches."""
    mesh = rules.current_mesh()
    if mesh is None:
        return x
    x = jnp.repeat(x, cache_heads(kind, mesh.shape) // kind.num_kv_heads, axis=-2)
    return rules.constrain(x, "batch", *[None] * (x.ndim - 3), "kv_heads", None)


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
        kind = spec.at(i)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, kind: ModelSpec = kind, packed: Attend = attends[i % size]
        ) -> jax.Array:
            cached = LayerCache(_as_cached(kind, k).transpose(0, 2, 3, 1), _as_cached(kind, v).transpose(0, 2, 1, 3))
            caches.append(LayerCache(*(rules.constrain(x, *CACHE_AXES) for x in cached)))
            return packed(q, k, v)

        x, _ = decoder.layer(kind, p, x, tables[i % size], attend)
    return caches


@partial(jax.jit, donate_argnames="lanes")
@_counted
def insert(lanes: LayerCache, prompts: LayerCache, sources: jax.Array) -> LayerCache:
    """Overwrite the lanes (R, …, S) whose `sources` (R,) int32 is not -1 with that row of `prompts` (P, …, S'
    ≤ S), counted in the lane's own shard. One layer at a time: the compiled function is small and little is held
    twice."""

    def merged(old: jax.Array, new: jax.Array, sources: jax.Array, axis: int) -> jax.Array:
        new = jnp.take(new, jnp.maximum(sources, 0), axis=0)
        pad = [(0, old.shape[a] - new.shape[a] if a == axis else 0) for a in range(4)]
        return jnp.where(sources[:, None, None, None] >= 0, jnp.pad(new, pad), old)

    def of(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        return _in_shards(partial(merged, axis=axis), old, new, sources)

    return LayerCache(of(lanes.k, prompts.k, 3), of(lanes.v, prompts.v, 2))


@partial(jax.jit, static_argnames="columns")
@_counted
def relocate(cache: LayerCache, sources: jax.Array, shift: jax.Array, columns: int) -> LayerCache:
    """The lanes or rows `sources` of a cache, counted in their shard, its columns rolled left by `shift`, then padded
    to `columns`."""

    def moved(a: jax.Array, sources: jax.Array, axis: int) -> jax.Array:
        a = jnp.roll(jnp.take(a, sources, axis=0), -shift, axis=axis)
        return jnp.pad(a, [(0, columns - a.shape[axis] if i == axis else 0) for i in range(4)])

    return LayerCache(
        _in_shards(partial(moved, axis=3), cache.k, sources), _in_shards(partial(moved, axis=2), cache.v, sources)
    )


def _in_shards(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """A function of caches (4 axes) and numbers of rows (1) to a cache, on each shard by itself."""
    axes = [CACHE_AXES if a.ndim == 4 else ("batch",) for a in arrays]
    return rules.per_device(lambda _, *parts: function(*parts), axes, CACHE_AXES, checked=False)(*arrays)


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
    tokens, positions = rules.constrain(tokens, "batch"), rules.constrain(positions, "batch")
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
            kind: ModelSpec = kind,
        ) -> jax.Array:
            q = rules.constrain(q, "batch", "heads", None)
            k, v = _as_cached(kind, k), _as_cached(kind, v)
            new = LayerCache(
                lax.dynamic_update_slice_in_dim(old.k, k[..., None], column, axis=3),
                lax.dynamic_update_slice_in_dim(old.v, v[:, :, None], column, axis=2),
            )
            new = LayerCache(*(rules.constrain(x, *CACHE_AXES) for x in new))
            written.append(new)
            return _attend(lane, new, q, seen, score)

        x, _ = decoder.layer(kind, p, x, tables[i % size], attend)
    x = decoder.norm(spec, x, view["final_norm"])
    return decoder.unembed(spec, view, x), written


def _draw(logits: jax.Array, uniforms: jax.Array, cuts: Cuts, way: Way) -> tuple[jax.Array, jax.Array]:
    """`sample`. On a mesh the devices along `tensor`, which have a part of the vocabulary each, share out the rows
    instead: every row is drawn by one device, as if there were no mesh."""
    mesh = rules.current_mesh()
    if mesh is None:
        return sample(logits, uniforms, cuts, way)
    B = logits.shape[0]
    shards = rules.ways("batch", mesh.shape)
    of_shard = B // shards
    padding = -of_shard % rules.ways("drawn", mesh.shape)

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(shards, of_shard, *x.shape[1:])
        return jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))

    def on_device(_: rules.Part, logits: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = uniforms.shape
        tokens, logprobs = sample(logits.reshape(-1, logits.shape[-1]), uniforms.reshape(-1), cuts, way)
        return tokens.reshape(shape), logprobs.reshape(shape)

    axes = ("batch", "drawn")
    drawn = rules.per_device(on_device, [axes, axes], (axes, axes), checked=False)(split(logits), split(uniforms))
    tokens, logprobs = (rules.constrain(x, "batch", None)[:, :of_shard].reshape(B) for x in drawn)
    return rules.constrain(tokens, "batch"), rules.constrain(logprobs, "batch")


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
        tokens, logprobs = _draw(logits, uniforms[:, i], cuts, way)
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

    rows = Rows(*(rules.constrain(jnp.asarray(x), "batch") for x in rows))
    uniforms = rules.constrain(uniforms, "batch")
    chunk = Chunk(
        rules.constrain(jnp.zeros((B, CHUNK), jnp.int32), "batch"),
        rules.constrain(jnp.zeros((B, CHUNK), jnp.float32), "batch"),
        rules.constrain(jnp.zeros(B, jnp.int32), "batch"),
        rows.active,
        jnp.int32(0),
    )
    _, chunk, own = lax.while_loop(unfinished, body, (rows.tokens, chunk, own))
    return jax.tree.map(rules.constrain, chunk), own
