"""The decode step's attention by TPU kernels, in interpret mode, is that by plain operations."""

import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models.scoring import Scoring
from burnish.rollout.decode import LayerCache, Seen, _attend, attend_by_kernels


@pytest.mark.parametrize("windowed", [False, True])
def test_attention_by_kernels_is_attention(windowed):
    R, W, K, rep, N, S, T = 2, 3, 2, 2, 64, 256, 128
    rng = np.random.default_rng(0)

    def cache(rows, columns):
        shapes = (rows, K, N, columns), (rows, K, columns, N)
        return LayerCache(*(jnp.array(rng.normal(size=shape), jnp.float32) for shape in shapes))

    lane, own = cache(R, S), cache(R * W, T)
    q = jnp.array(rng.normal(size=(R * W, K * rep, N)), jnp.float32)
    lane_seen = np.arange(S) < np.array([[200], [0]])  # the second prompt has one token, so its lane is empty
    if windowed:
        lane_seen = lane_seen[:, None] & (rng.random((R, W, S)) < 0.5)
    own_seen = np.arange(T) < np.array([1, 5, 127, 128, 64, 2])[:, None]
    seen = Seen(jnp.array(lane_seen), jnp.array(own_seen))
    for score in (Scoring(0.2, None), Scoring(0.2, 3.0)):
        expected = _attend(lane, own, q, seen, score)
        found = attend_by_kernels(lane, own, q, seen, score, interpret=True)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
