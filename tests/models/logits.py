"""Logits of packed rows, for the tests that compare them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models.decoder import forward, unembed


@partial(jax.jit, static_argnums=0)
def _logits(spec, params, tokens, positions, segments, branches):
    return unembed(spec, params, forward(spec, params, tokens, positions, segments, branches))


def logits_of(spec, params, tokens, positions=None, segments=None, branches=None):
    """(B, T, V) of tokens (B, T): where nothing else is said, each row one sequence without padding."""
    tokens = jnp.asarray(tokens)
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T)) if positions is None else jnp.asarray(positions)
    segments = jnp.ones((B, T), jnp.int32) if segments is None else jnp.asarray(segments)
    branches = jnp.zeros((B, T), jnp.int32) if branches is None else jnp.asarray(branches)
    return np.asarray(_logits(spec, params, tokens, positions, segments, branches))
