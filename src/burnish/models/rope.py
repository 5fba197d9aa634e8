"""Rotary position embedding (Su et al. 2021) in Hugging Face's half-split layout, and its scalings."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Radians per position of each pair, (N/2,) float32; 0 for pairs that do not turn."""
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
    elif rope.kind == "yarn":
        keep = _yarn_untouched(rope, head_dim)
        freq = (1 - keep) * freq / rope.factor + keep * freq
    freq[int(rope.rotated * head_dim // 2) :] = 0.0
    return freq.astype(np.float32)


def _yarn_untouched(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Peng et al. 2023, section 3.2: 1 for pairs that turn more than beta_fast times over the original length, 0 for
    those that turn less than beta_slow times, a ramp over the pair's number between."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / (high - low if high != low else 1e-3)
    return 1 - np.clip(ramp, 0.0, 1.0)


def rope_tables(rope: RopeSpec, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """positions (...) int32 -> cos, sin, each (..., N/2) float32."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if rope.magnitude == 1.0 else (rope.magnitude * cos, rope.magnitude * sin)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x (..., heads, N) by cos, sin (..., N/2): pairs are (i, i + N/2). Computed in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
