"""The decoder: one layer function, and a forward pass over packed rows that scans it.

`layer` knows nothing about caches or masks: its caller passes `attend`, a function from (q, k, v) of this
layer to the attention output, so that training (packed rows), prefill (packed rows, keys and values kept)
and decoding (one token a row against a cache) share every other line. Norms, rope, softmax, logits are
float32; matrix products run in `dtype` (the compute dtype).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from burnish.models.attention import packed_attention
from burnish.models.params import Params
from burnish.models.rope import apply_rope, rope_tables
from burnish.models.spec import ModelSpec

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q (..., H, N), k (..., K, N), v (..., K, N)), rope applied -> (..., H, N)."""


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Zhang & Sennrich 2019 (arXiv:1910.07467), computed in float32, returned in x's dtype.

    x (..., D), scale (D,). The derivative is written out for the sum over rows in that of `scale`: as a product with
    ones it is many times faster on CPU than as a reduction.
    """
    return _rms_norm_fwd(x, scale, eps)[0]


def _rms_norm_fwd(x, scale, eps):
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse).astype(x.dtype) * scale.astype(x.dtype), (x, scale, inverse)


def _rms_norm_bwd(eps, residuals, dy):
    x, scale, inverse = residuals
    normed = x.astype(jnp.float32) * inverse
    dy = dy.astype(jnp.float32)
    d_normed = dy * scale.astype(jnp.float32)
    dx = inverse * (d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True))
    per_row = (dy * normed).reshape(-1, x.shape[-1])
    d_scale = jnp.ones((1, per_row.shape[0]), jnp.float32) @ per_row
    return dx.astype(x.dtype), d_scale[0].astype(scale.dtype)


rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


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


def layer(spec: ModelSpec, p: Params, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
    """One decoder layer. x (..., D); p: this layer's arrays; rope: (cos, sin) each (..., N/2) float32."""
    h = rms_norm(x, p["input_norm"], spec.rms_norm_eps)
    q = apply_rope(linear(h, p["q_proj"], p.get("q_bias")), *rope)
    k = apply_rope(linear(h, p["k_proj"], p.get("k_bias")), *rope)
    v = linear(h, p["v_proj"], p.get("v_bias"))
    x = x + linear(attend(q, k, v), p["o_proj"], p.get("o_bias"), in_axes=2)
    h = rms_norm(x, p["post_attention_norm"], spec.rms_norm_eps)
    gate = jax.nn.silu(linear(h, p["gate_proj"], p.get("gate_bias")))
    return x + linear(gate * linear(h, p["up_proj"], p.get("up_bias")), p["down_proj"], p.get("down_bias"))


def embed(params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
    """tokens (...) int32 -> (..., D) in `dtype`."""
    return jnp.take(params["embed"], tokens, axis=0).astype(dtype)


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """hidden (..., D) after the final norm -> logits (..., V) float32."""
    head = params["lm_head"] if "lm_head" in params else params["embed"]
    return jax.lax.dot_general(
        hidden,
        head.astype(hidden.dtype),
        (((hidden.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
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
    rope = rope_tables(spec, positions)
    branches = jnp.zeros_like(segments) if branches is None else branches
    attend = packed_attention(segments, branches)

    def body(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        return remat(lambda x, p: layer(spec, p, x, rope, attend))(x, p), None

    x, _ = jax.lax.scan(body, embed(params, tokens, dtype), params["layers"])
    return rms_norm(x, params["final_norm"], spec.rms_norm_eps)
