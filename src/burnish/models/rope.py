"""Rotary position embedding (Su et al. 2021) in Hugging Face's half-split layout; Llama 3.1's scaling."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models.spec import ModelSpec, RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Radians per position of each rotated pair, (N/2,) float32."""
    freq = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / freq
        # 0 at wavelengths above original/low (fully scaled), 1 below original/high (untouched).
        keep = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        keep = np.clip(keep, 0.0, 1.0)
        freq = (1 - keep) * freq / rope.factor + keep * freq
    return freq.astype(np.float32)


def rope_tables(spec: ModelSpec, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """positions (...) int32 -> cos, sin, each (..., N/2) float32."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(spec.rope, spec.head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x (..., heads, N) by cos, sin (..., N/2): pairs are (i, i + N/2). Computed in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
