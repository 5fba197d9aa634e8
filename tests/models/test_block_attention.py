"""Attention in blocks against all T² scores, and the hand-written derivative of the norm against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models.attention import Scoring, block_attention, block_plan, packed_attention, plain_attention, visibility
from burnish.models.decoder import rms_norm
from burnish.models.spec import ModelSpec


def random_rows(seed, B, T):
    """Segments of a prompt and 1 to 3 completions of random lengths, with padding at either end."""
    rng = np.random.default_rng(seed)
    segments, branches = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    for b in range(B):
        at, segment, end = int(rng.integers(0, 10)), 0, T - int(rng.integers(0, T // 3))
        while at < end:
            segment += 1
            for branch in range(rng.integers(2, 5)):
                length = int(rng.integers(1, T // 4))
                here = slice(at, min(at + length, end))
                segments[b, here], branches[b, here] = segment, branch
                at += length
    return jnp.asarray(segments), jnp.asarray(branches)


def inputs(seed, B, T, H=4, K=2, N=8):
    keys = jax.random.split(jax.random.key(seed), 4)
    q, weight = (jax.random.normal(k, (B, T, H, N)) for k in keys[:2])
    k, v = (jax.random.normal(k, (B, T, K, N)) for k in keys[2:])
    return q, k, v, weight


@pytest.mark.parametrize(("B", "T", "block"), [(1, 64, 8), (2, 96, 16), (3, 48, 48)])
@pytest.mark.parametrize(("seed", "window", "softcap"), [(0, None, None), (1, None, None), (2, 7, None), (3, 7, 1.5)])
def test_blocks_give_the_same_values_and_gradients_as_all_scores(B, T, block, seed, window, softcap):
    segments, branches = random_rows(seed, B, T)
    visible = visibility(segments, branches, jnp.broadcast_to(jnp.arange(T), (B, T)), window)
    score = Scoring(8**-0.5, softcap)
    q, k, v, weight = inputs(seed, B, T)
    weight = weight * (segments != 0)[..., None, None]
    real = np.asarray(segments != 0)

    def value(attend):
        def f(q, k, v):
            out = attend(q, k, v)
            return jnp.sum(out * weight), out

        return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))

    (_, expected), expected_grads = value(plain_attention(visible, score))(q, k, v)
    (_, got), got_grads = value(block_attention(block_plan(visible, block), score))(q, k, v)
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(expected)[real], atol=2e-6)
    assert np.isfinite(got).all()
    for a, b in zip(got_grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_only_visible_blocks_are_visited():
    """A prompt of one block and four completions of one block: 9 of 25 pairs have something to see."""
    branches = jnp.repeat(jnp.arange(5), 16)[None]
    ones, positions = jnp.ones_like(branches), jnp.arange(80)[None]
    plan = block_plan(visibility(ones, branches, positions, None), 16)
    assert plan.counts.tolist() == [1, 2, 2, 2, 2]
    assert plan.keys[3, :2].tolist() == [0, 3]
    # A window of 4 reaches only the block itself, but for the first completion, which follows the prompt.
    windowed = block_plan(visibility(ones, branches, positions, 4), 16)
    assert windowed.counts.tolist() == [1, 2, 1, 1, 1]


def test_long_rows_are_computed_in_blocks_and_agree():
    segments, branches = random_rows(0, 1, 384)
    q, k, v, _ = inputs(0, 1, 384)
    real = np.asarray(segments != 0)
    positions = jnp.arange(384)[None]
    spec = ModelSpec("llama", 1, 32, 4, 2, 8, 64, 64, 1e-5, True, 512, window=50, attention_softcap=3.0)
    got = packed_attention(spec, segments, branches, positions)(q, k, v)
    expected = plain_attention(visibility(segments, branches, positions, 50), Scoring(8**-0.5, 3.0))(q, k, v)
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(expected)[real], atol=2e-6)


@pytest.mark.parametrize(("offset", "rounds_last"), [(0.0, False), (1.0, True), (1.0, False), (0.0, True)])
def test_norm_has_the_derivative_of_its_formula(offset, rounds_last):
    shapes = [(3, 5, 8), (8,), (3, 5, 8)]
    x, scale, weight = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))

    def formula(x, scale):
        return jnp.sum(weight * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * (offset + scale))

    def ours(x, scale):
        return jnp.sum(weight * rms_norm(x, scale, 1e-5, offset, rounds_last))

    for got, want in zip(
        jax.grad(ours, argnums=(0, 1))(x, scale), jax.grad(formula, argnums=(0, 1))(x, scale), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)
