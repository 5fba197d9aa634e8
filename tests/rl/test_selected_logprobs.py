import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from burnish.rl import logprobs
from burnish.rl.logprobs import selected_logprobs


@pytest.fixture(params=["one chunk", "many chunks, kept", "many chunks, recomputed"])
def chunking(request, monkeypatch):
    if request.param != "one chunk":
        monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 8)
    if request.param == "many chunks, recomputed":
        monkeypatch.setattr(logprobs, "KEEP_BYTES", 0)


def inputs(B=2, M=11, D=8, V=50, seed=0):
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(B, M, D)), rng.normal(size=(V, D))
    return jnp.float32(hidden), jnp.float32(head), jnp.asarray(rng.integers(0, V, (B, M)), jnp.int32)


@pytest.mark.usefixtures("chunking")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_and_entropy_equal_float64(temperature):
    hidden, head, targets = inputs()
    lp, entropy = selected_logprobs(hidden, head, targets, jnp.int32(9), temperature)
    logits = np.einsum("bmd,vd->bmv", np.float64(hidden), np.float64(head)) / temperature
    full = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(full, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(lp[:, :9], chosen[:, :9], atol=1e-5)
    np.testing.assert_allclose(entropy[:, :9], -(np.exp(full) * full).sum(-1)[:, :9], atol=1e-5)


@pytest.mark.usefixtures("chunking")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_soft_cap_bounds_logits_before_the_temperature(temperature):
    hidden, head, targets = inputs()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=targets.shape), jnp.float32)

    def plain(hidden, head):
        logits = 3.0 * jnp.tanh(jnp.einsum("bmd,vd->bmv", hidden, head) / 3.0) / temperature
        full = jax.nn.log_softmax(logits)
        return jnp.sum(weights * jnp.take_along_axis(full, targets[..., None], -1)[..., 0])

    def ours(hidden, head):
        lp, _ = selected_logprobs(hidden, head, targets, jnp.int32(11), temperature, softcap=3.0)
        return jnp.sum(weights * lp)

    want, want_grads = jax.value_and_grad(plain, argnums=(0, 1))(hidden, head)
    got, grads = jax.value_and_grad(ours, argnums=(0, 1))(hidden, head)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.usefixtures("chunking")
def test_gradients_equal_those_of_log_softmax():
    hidden, head, targets = inputs()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=targets.shape), jnp.float32).at[:, 9:].set(0)

    def ours(hidden, head):
        return jnp.sum(weights * selected_logprobs(hidden, head, targets, jnp.int32(9), 0.7)[0])

    def plain(hidden, head):
        full = jax.nn.log_softmax(jnp.einsum("bmd,vd->bmv", hidden, head) / 0.7)
        return jnp.sum(weights * jnp.take_along_axis(full, targets[..., None], -1)[..., 0])

    for got, expected in zip(
        jax.grad(ours, argnums=(0, 1))(hidden, head), jax.grad(plain, argnums=(0, 1))(hidden, head), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.usefixtures("chunking")
def test_gradients_equal_finite_differences():
    hidden, head, targets = inputs(B=1, M=5, D=4, V=7)
    check_grads(
        lambda h, w: selected_logprobs(h, w, targets, jnp.int32(5), 1.0)[0], (hidden, head), order=1, modes=["rev"]
    )


def test_scoring_happens_at_the_sampling_temperature():
    hidden, head = jnp.ones((1, 1, 1)), jnp.array([[2.0], [0.0]])
    targets = jnp.zeros((1, 1), jnp.int32)
    assert float(selected_logprobs(hidden, head, targets, jnp.int32(1), 0.5)[0][0, 0]) == pytest.approx(
        -0.01815, abs=1e-5
    )
    assert float(selected_logprobs(hidden, head, targets, jnp.int32(1), 1.0)[0][0, 0]) == pytest.approx(
        -0.12693, abs=1e-5
    )


def test_logits_of_the_size_of_1e4_stay_finite():
    hidden, head, targets = inputs()
    lp, entropy = selected_logprobs(1e4 * hidden, head, targets, jnp.int32(11), 1.0)
    assert np.isfinite(lp).all()
    assert np.isfinite(entropy).all()
