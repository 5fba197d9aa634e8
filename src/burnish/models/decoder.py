"""The decoder: one layer function, and a forward pass over packed rows that scans it.

`layer` knows nothing about caches or masks: its caller passes `attend`, a function from (q, k, v) of this
layer to the attention output, so that training (packed rows), prefill (packed rows, keys and values kept)
and decoding (one token a row against a cache) share every other line. It knows no family either: what a model has
is in its ModelSpec and in which arrays there are. Norms, rope, softmax, router, logits are float32; matrix products
run in `dtype` (the compute dtype).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from burnish.models.attention import Attend, packed_attention, scoring
from burnish.models.moe import Load, Routing, apply_experts, load_of, route
from burnish.models.params import Params, head
from burnish.models.rope import apply_rope, rope_tables
from burnish.models.spec import ModelSpec, per_kind
from burnish.parallel.rules import Part, constrain, per_device

Tables = tuple[jax.Array, jax.Array]
"""cos and sin, each (..., N/2) float32."""


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0, rounds_last: bool = False) -> jax.Array:
    """Zhang & Sennrich 2019 (arXiv:1910.07467), computed in float32, returned in x's dtype; see `ModelSpec` for
    `offset` and `rounds_last`.

    x (..., D), scale (D,). The derivative is written out for the sum over rows in that of `scale`: as a product with
    ones it is many times faster on CPU than as a reduction.
    """
    return _rms_norm_fwd(x, scale, eps, offset, rounds_last)[0]


def _rms_norm_fwd(x, scale, eps, offset, rounds_last):
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if rounds_last:
        y = (x32 * inverse * (offset + scale.astype(jnp.float32))).astype(x.dtype)
    else:
        factor = scale.astype(x.dtype)
        y = (x32 * inverse).astype(x.dtype) * (offset + factor if offset else factor)
    return y, (x, scale, inverse)


def _rms_norm_bwd(eps, offset, rounds_last, residuals, dy):
    x, scale, inverse = residuals
    normed = x.astype(jnp.float32) * inverse
    dy = dy.astype(jnp.float32)
    factor = scale.astype(jnp.float32)
    d_normed = dy * (offset + factor if offset else factor)
    dx = inverse * (d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True))
    per_row = (dy * normed).reshape(-1, x.shape[-1])
    d_scale = jnp.ones((1, per_row.shape[0]), jnp.float32) @ per_row
    return dx.astype(x.dtype), d_scale[0].astype(scale.dtype)


rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


def norm(spec: ModelSpec, x: jax.Array, scale: jax.Array) -> jax.Array:
    """The model's RMS norm with one of its scales."""
    return rms_norm(x, scale, spec.rms_norm_eps, spec.norm_offset, spec.norm_rounds_last)


def normalise(x: jax.Array, eps: float) -> jax.Array:
    """x divided by its root mean square over the last axis, without a scale; float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, in_axes: int = 1) -> jax.Array:
    """x (..., *in) times weight (*in, *out), the product in x's dtype; `in_axes` counts the contracted axes.

    One matrix times one matrix, whatever the axes: the derivatives are then such products too, with no operand
    transposed in memory on CPU.
    """
    rows, out = x.shape[: x.ndim - in_axes], weight.shape[in_axes:]
    contracted = math.prod(weight.shape[:in_axes])
    y = x.reshape(-1, contracted) @ weight.reshape(contracted, -1).astype(x.dtype)
    y = y.reshape(*rows, *out)
    return y if bias is None else y + bias.astype(x.dtype)


def activation(spec: ModelSpec, x: jax.Array) -> jax.Array:
    return jax.nn.silu(x) if spec.activation == "silu" else jax.nn.gelu(x, approximate=True)


def split(x: jax.Array, *last: str) -> jax.Array:
    """x (B, …) constrained on a mesh: the first axis is the batch, the last ones have these logical names."""
    return constrain(x, "batch", *[None] * (x.ndim - 1 - len(last)), *last)


def layer(spec: ModelSpec, p: Params, x: jax.Array, rope: Tables, attend: Attend) -> tuple[jax.Array, Routing | None]:
    """One decoder layer, of the model or kind `spec` (no pattern: `ModelSpec.at`). x (..., D); p: this layer's arrays.

    Returns x after the layer, and where its router sent the tokens if it has experts.
    """
    x = split(x + _attention(spec, p, norm(spec, x, p["input_norm"]), rope, attend), "width")
    y, routing = _feed_forward(spec, p, x)
    x = split(x + y, "width")
    if "layer_scalar" in p:
        x = x * jax.lax.stop_gradient(p["layer_scalar"]).astype(x.dtype)
    return x, routing


def _attention(spec: ModelSpec, p: Params, h: jax.Array, rope: Tables, attend: Attend) -> jax.Array:
    q = linear(h, p["q_proj"], p.get("q_bias"))
    k = linear(h, p["k_proj"], p.get("k_bias"))
    v = k if spec.keys_are_values else linear(h, p["v_proj"], p.get("v_bias"))
    if spec.qk_norm:
        q, k = norm(spec, q, p["q_norm"]), norm(spec, k, p["k_norm"])
    if spec.v_norm:
        v = normalise(v, spec.rms_norm_eps).astype(v.dtype)
    q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    q, k, v = split(q, "heads", "head_dim"), split(k, "kv_heads", "head_dim"), split(v, "kv_heads", "head_dim")
    y = linear(attend(q, k, v), p["o_proj"], p.get("o_bias"), in_axes=2)
    return norm(spec, y, p["attention_output_norm"]) if spec.output_norms else y


def _feed_forward(spec: ModelSpec, p: Params, x: jax.Array) -> tuple[jax.Array, Routing | None]:
    """What the MLP, the experts, or both add to the residual stream x (..., D)."""
    h = norm(spec, x, p["post_attention_norm"])
    routing = None
    if spec.experts is None:
        y = _mlp(spec, p, h)
    elif spec.experts.beside_mlp:
        dense = norm(spec, _mlp(spec, p, h), p["dense_output_norm"])
        read = normalise(x, spec.rms_norm_eps) * p["router_scale"].astype(jnp.float32) * spec.d_model**-0.5
        y, routing = _experts(spec, p, norm(spec, x, p["expert_norm"]), read)
        y = dense + norm(spec, y, p["expert_output_norm"])
    else:
        y, routing = _experts(spec, p, h, h.astype(jnp.float32))
    return norm(spec, y, p["mlp_output_norm"]) if spec.output_norms else y, routing


def _mlp(spec: ModelSpec, p: Params, h: jax.Array) -> jax.Array:
    gate = activation(spec, linear(h, p["gate_proj"], p.get("gate_bias")))
    hidden = split(gate * linear(h, p["up_proj"], p.get("up_bias")), "mlp")
    return linear(hidden, p["down_proj"], p.get("down_bias"))


def _experts(spec: ModelSpec, p: Params, h: jax.Array, read: jax.Array) -> tuple[jax.Array, Routing]:
    """h (..., D) for the experts, `read` (..., D) float32 for the router."""
    D = spec.d_model
    routing = route(spec, p, split(read.reshape(-1, D), "width"))
    y = apply_experts(spec, p, split(h.reshape(-1, D), "width"), routing, lambda a: activation(spec, a))
    return y.reshape(h.shape), routing


def embed(spec: ModelSpec, params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
    """tokens (...) int32 -> (..., D) in `dtype`."""

    def look_up(part: Part, table: jax.Array, tokens: jax.Array) -> jax.Array:
        # A device looks its columns of the table up for every row of its fsdp group, and gives the others theirs:
        # what is moved are the few rows of the table that are wanted.
        exchange = part.is_split("embed") and part.is_split("batch")
        if exchange:
            tokens = jax.lax.all_gather(tokens, part.names["embed"], axis=0, tiled=True)
        if part.is_split("vocab"):
            own = tokens - part.index("vocab") * table.shape[0]
            here = (own >= 0) & (own < table.shape[0])
            x = jnp.take(table, jnp.where(here, own, 0), axis=0).astype(dtype)
            x = part.sum(jnp.where(here[..., None], x, 0), "vocab")
        else:
            x = jnp.take(table, tokens, axis=0).astype(dtype)
        if exchange:
            return jax.lax.all_to_all(x, part.names["embed"], split_axis=0, concat_axis=x.ndim - 1, tiled=True)
        return part.gather(x, "embed", x.ndim - 1)

    x = per_device(look_up, [("vocab", "embed"), ("batch",)], ("batch",))(params["embed"], tokens)
    return x if spec.embed_scale == 1.0 else x * jnp.asarray(spec.embed_scale, dtype)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap · tanh(x / cap): x where it is small, never beyond ±cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def unembed(spec: ModelSpec, params: Params, hidden: jax.Array) -> jax.Array:
    """hidden (..., D) after the final norm -> logits (..., V) float32."""
    logits = jax.lax.dot_general(
        hidden,
        head(params).astype(hidden.dtype),
        (((hidden.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return soft_cap(split(logits, "vocab"), spec.final_softcap)


def ropes(spec: ModelSpec, positions: jax.Array) -> list[Tables]:
    """The rope tables of each position of the pattern."""
    return per_kind(
        spec, lambda kind: (kind.rope, kind.head_dim), lambda kind: rope_tables(kind.rope, kind.head_dim, positions)
    )


def packed_attends(spec: ModelSpec, segments: jax.Array, branches: jax.Array, positions: jax.Array) -> list[Attend]:
    """The packed attention of each position of the pattern."""
    return per_kind(
        spec,
        lambda kind: (kind.window, scoring(kind)),
        lambda kind: packed_attention(kind, segments, branches, positions),
    )


def forward(
    spec: ModelSpec,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    branches: jax.Array | None = None,
    *,
    dtype: Any = jnp.float32,
    remat: Callable[[Callable], Callable] = lambda f: f,
) -> jax.Array:
    """Hidden states after the final norm, for rows that hold any packing of sequences.

    tokens, positions, segments, branches: (B, T) int32. Token t attends to token s of its row where s <=
    t, their segments are equal and not 0 (0 marks padding), and s's branch is 0 or t's own: a segment is a
    prompt (branch 0) followed by its completions (branches 1..G), each seeing the prompt and itself. Left
    padding, right padding and packing are all this one rule. Returns (B, T, D) in `dtype`; values at
    padding are finite and meaningless. `remat` wraps the layer function (jax.checkpoint or the identity).
    """
    counts = segments != 0
    return forward_with_load(spec, params, tokens, positions, segments, branches, counts, dtype=dtype, remat=remat)[0]


def forward_with_load(
    spec: ModelSpec,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    branches: jax.Array | None,
    counts: jax.Array,
    *,
    dtype: Any = jnp.float32,
    remat: Callable[[Callable], Callable] = lambda f: f,
) -> tuple[jax.Array, Load | None]:
    """`forward`, and how the routers of all layers with experts spread the tokens where `counts` (B, T) is True."""
    branches = jnp.zeros_like(segments) if branches is None else branches
    tokens, positions, segments, branches = map(split, (tokens, positions, segments, branches))
    counts = split(counts).reshape(-1)
    size = len(spec.pattern)
    kinds = [spec.at(i) for i in range(size)]
    tables = ropes(spec, positions)
    attends = packed_attends(spec, segments, branches, positions)

    def one(i: int, x: jax.Array, p: Params) -> tuple[jax.Array, Load | None]:
        kind, rope, attend = kinds[i], tables[i], attends[i]
        x, routing = remat(lambda x, p: layer(kind, p, x, rope, attend))(x, p)
        return x, None if routing is None else load_of(kind, routing, counts)

    def block(x: jax.Array, p: Params) -> tuple[jax.Array, list[Load]]:
        loads = []
        for i in range(size):
            x, load = one(i, x, p if size == 1 else p[str(i)])
            loads += [] if load is None else [load]
        return x, loads

    x = split(embed(spec, params, tokens, dtype), "width")
    loads: list[Load] = []
    if spec.num_layers >= size:
        x, loads = jax.lax.scan(block, x, params["layers"])
    for i in range(spec.num_layers % size):
        x, load = one(i, x, params["tail"][str(i)])
        loads += [] if load is None else [jax.tree.map(lambda a: a[None], load)]
    hidden = norm(spec, x, params["final_norm"])
    return hidden, jax.tree.map(lambda *a: jnp.concatenate(a), *loads) if loads else None
