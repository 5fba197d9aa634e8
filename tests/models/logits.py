"""Logits of packed rows, for the tests that compare them."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models.decoder import forward, unembed

REFERENCES = Path(__file__).parents[1] / "references"


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


def padded_logits(model, ids, length):
    """(n, V) of one sequence, right-padded to `length` so that sequences compile once."""
    row, segments = np.zeros((2, 1, length), np.int32)
    row[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    return logits_of(*model, row, segments=segments)[0, : len(ids)]


def assert_equal_to_reference(model, file, i, length, tolerance=1e-4):
    """The highest logits of text `i` of a file that make_references.py made of real weights, and the log-sum-exp of
    all."""
    reference = np.load(REFERENCES / file)
    got = padded_logits(model, reference[f"ids_{i}"], length)
    top = reference[f"top_ids_{i}"]
    assert (got.argmax(-1) == top[:, 0]).all()
    assert np.abs(np.take_along_axis(got, top, -1) - reference[f"top_logits_{i}"]).max() < tolerance
    assert np.abs(np.asarray(jax.nn.logsumexp(got, axis=-1)) - reference[f"logsumexp_{i}"]).max() < tolerance
