"""Attention over packed rows: the reference path, used for training and prefill on CPU.

Grouped-query heads are never repeated in memory: the H/K query heads of a kv head are folded into its
batch of queries. Masked scores are set to a large negative finite number, so a row that sees nothing stays
finite.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

MASKED = -1e30


def visibility(segments: jax.Array, branches: jax.Array) -> jax.Array:
    """(B, T) segment and branch ids -> (B, T, T) bool, True where query t (axis 1) may see key s (axis 2)."""
    T = segments.shape[1]
    same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] != 0)
    branch = (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    return same & branch & jnp.tril(jnp.ones((T, T), bool))


def packed_attention(
    segments: jax.Array, branches: jax.Array
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The `attend` of a packed row: (q (B,T,H,N), k (B,T,K,N), v (B,T,K,N)) -> (B,T,H,N).

    The softmax is float32.
    """
    visible = visibility(segments, branches)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        B, T, H, N = q.shape
        K = k.shape[2]
        grouped = q.reshape(B, T, K, H // K, N)
        scores = jnp.einsum("btkrn,bskn->bkrts", grouped, k, preferred_element_type=jnp.float32) * N**-0.5
        scores = jnp.where(visible[:, None, None], scores, MASKED)
        probs = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bkrts,bskn->btkrn", probs, v).reshape(B, T, H, N)

    return attend
