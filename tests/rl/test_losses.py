from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.rl import losses
from burnish.rl.losses import LossOptions
from burnish.rl.types import Denominators, PackedBatch


def make_batch(lengths, advantages, width=None, **changes):
    """A batch whose list holds completions of these lengths; rows of tokens are not needed by a loss."""
    n = sum(lengths)
    width = width or n
    sequences = np.repeat(np.arange(len(lengths)), lengths)

    def listed(values, dtype):
        out = np.zeros((1, width), dtype)
        out[0, :n] = values
        return jnp.asarray(out)

    zeros = jnp.zeros((1, width), jnp.int32)
    fields = dict(
        tokens=zeros,
        positions=zeros,
        segments=zeros,
        branches=zeros,
        source=zeros,
        targets=zeros,
        trained=listed(True, bool),
        sequences=listed(sequences, np.int32),
        lengths=listed(np.repeat(lengths, lengths), np.float32),
        advantages=listed(np.repeat(np.asarray(advantages, np.float32), lengths), np.float32),
        sampler_logprobs=jnp.zeros((1, width), jnp.float32),
        count=jnp.int32(n),
    )
    return PackedBatch(**{**fields, **changes})


def value(options, lp, batch, denominators):
    return losses.loss(options, lp, jnp.zeros_like(lp), batch, denominators)[0]


def test_micro_batches_of_2_and_8_tokens_share_the_steps_denominator():
    step = Denominators(2.0, 10.0, 10.0)
    options = LossOptions(algorithm="cross-entropy", aggregation="token-mean")
    shares = [
        value(options, jnp.full((1, 2), -1.0), make_batch([2], [1.0]), step),
        value(options, jnp.zeros((1, 8)), make_batch([8], [1.0]), step),
    ]
    assert float(sum(shares)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sequence-mean-token-mean", (1 + 3) / 2), ("token-mean", (2 + 9) / 5), ("sequence-mean", (2 + 9) / 2)],
)
def test_aggregation_modes(aggregation, expected):
    lp = jnp.array([[-1.0, -1.0, -2.0, -3.0, -4.0]])
    options = LossOptions(algorithm="cross-entropy", aggregation=aggregation)
    assert float(value(options, lp, make_batch([2, 3], [1, 1]), Denominators(2.0, 5.0, 5.0))) == pytest.approx(expected)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo-token", "cross-entropy"])
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_what_stands_at_untrained_entries_leaks_nowhere(algorithm, poison):
    old = jnp.array([[-1.0, -2.0, poison, poison]])
    batch = make_batch([2], [1.0], width=4, old_logprobs=old, reference_logprobs=old, sampler_logprobs=old)
    options = LossOptions(algorithm=algorithm, beta=0.0 if algorithm == "cross-entropy" else 0.1)

    def f(lp):
        v, metrics = losses.loss(options, lp, lp, batch, Denominators(1.0, 2.0, 2.0))
        return v, metrics

    (v, metrics), grad = jax.value_and_grad(f, has_aux=True)(jnp.array([[-1.5, -1.0, poison, poison]]))
    assert np.isfinite(v)
    assert all(np.isfinite(m) for m in metrics.values())
    assert np.isfinite(grad).all()
    assert (grad[0, 2:] == 0).all()


def test_nothing_to_train_gives_loss_and_gradient_zero():
    batch = make_batch([], [], width=4)
    options = LossOptions()
    v, grad = jax.value_and_grad(lambda lp: value(options, lp, batch, Denominators(1.0, 1.0, 1.0)))(jnp.ones((1, 4)))
    assert v == 0
    assert (grad == 0).all()


def test_a_huge_log_ratio_has_a_finite_gradient():
    naive = jax.grad(lambda x: jnp.minimum(jnp.exp(x) - x - 1, 10.0))(200.0)
    assert np.isnan(naive)
    ours = jax.grad(lambda lp: losses.k3(lp, jnp.float32(0.0)))(jnp.float32(-200.0))
    assert np.isfinite(ours)
    for algorithm in ("grpo", "gspo-token"):
        for gap in (200.0, -200.0):
            batch = make_batch(
                [1], [-1.0], old_logprobs=jnp.full((1, 1), gap), reference_logprobs=jnp.full((1, 1), gap)
            )
            grad = jax.grad(
                lambda lp, a=algorithm, b=batch: value(
                    LossOptions(algorithm=a, beta=1.0), lp, b, Denominators(1.0, 1.0, 1.0)
                )
            )(jnp.zeros((1, 1)))
            assert np.isfinite(grad).all()


def test_kl_gradient_is_that_of_the_reverse_kl():
    """Over three actions, the expectation over the policy of the loss's gradient, by enumeration."""
    logits = jnp.array([0.3, -0.8, 1.1])
    reference = jax.nn.log_softmax(jnp.array([-0.5, 0.4, 0.2]))

    def reverse_kl(logits):
        lp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(lp) * (lp - reference))

    def drawn(logits, action):
        batch = make_batch([1], [0.0], reference_logprobs=reference[action].reshape(1, 1))
        lp = jax.nn.log_softmax(logits)[action].reshape(1, 1)
        return value(LossOptions(beta=1.0), lp, batch, Denominators(1.0, 1.0, 1.0))

    probs = jax.nn.softmax(logits)
    expected = sum(probs[a] * jax.grad(drawn)(logits, a) for a in range(3))
    path_only = sum(
        probs[a] * jax.grad(lambda x, a=a: losses.k3(jax.nn.log_softmax(x)[a], reference[a]))(logits) for a in range(3)
    )
    np.testing.assert_allclose(expected, jax.grad(reverse_kl)(logits), atol=1e-6)
    assert np.abs(path_only - jax.grad(reverse_kl)(logits)).max() > 0.05


def test_clipping_stops_the_gradient_on_the_far_side_only():
    old = jnp.zeros((1, 4))
    lp = jnp.log(jnp.array([[1.5, 0.5, 1.5, 0.5]]))
    batch = make_batch([1, 1, 1, 1], [1.0, 1.0, -1.0, -1.0], old_logprobs=old)
    options = LossOptions(epsilon_low=0.2, epsilon_high=0.3)
    step = Denominators(4.0, 4.0, 4.0)
    (v, metrics), grad = jax.value_and_grad(lambda x: losses.loss(options, x, x, batch, step), has_aux=True)(lp)
    assert float(v) == pytest.approx(-(1.3 + 0.5 - 1.5 - 0.8) / 4)
    np.testing.assert_allclose(grad[0], [0.0, -0.5 / 4, 1.5 / 4, 0.0], atol=1e-6)
    assert float(metrics["clip_fraction"]) == pytest.approx(0.5)


def test_gspo_weighs_every_token_by_its_completions_ratio():
    old = jnp.zeros((1, 5))
    lp = jnp.array([[0.1, -0.3, 0.02, 0.03, 0.01]])
    batch = make_batch([2, 3], [1.0, -1.0], old_logprobs=old)
    options = LossOptions(algorithm="gspo-token", aggregation="sequence-mean-token-mean")
    v, grad = jax.value_and_grad(lambda x: value(options, x, batch, Denominators(2.0, 5.0, 5.0)))(lp)
    s = np.exp([-0.1, 0.02])
    assert float(v) == pytest.approx((-s[0] + s[1]) / 2, rel=1e-6)
    np.testing.assert_allclose(grad[0], np.repeat([-s[0] / 4, s[1] / 6], [2, 3]), rtol=1e-5)


def test_gspo_of_a_part_of_the_rows_is_that_parts_share():
    """Rows on other devices have the completions with the lower numbers."""
    options = LossOptions(algorithm="gspo-token")
    rng = np.random.default_rng(0)
    batch = make_batch([2, 3, 1, 4], [1.0, -1.0, 0.5, 2.0], width=12, old_logprobs=jnp.array(rng.normal(size=(1, 12))))
    lp = batch.old_logprobs + 0.3 * jnp.array(rng.normal(size=(1, 12)))

    def part(at):
        cut = {name: jnp.asarray(x)[:, at] for name, x in vars(batch).items() if np.ndim(x) == 2}
        return value(options, lp[:, at], replace(batch, **cut), Denominators(4.0, 10.0, 10.0))

    whole = part(slice(None))
    assert float(part(slice(0, 5)) + part(slice(5, 12))) == pytest.approx(float(whole), rel=1e-6)


def test_the_penalty_without_reference_logprobs_is_refused():
    with pytest.raises(ValueError, match="reference"):
        value(LossOptions(beta=0.1), jnp.zeros((1, 2)), make_batch([2], [1.0]), Denominators(1.0, 2.0, 2.0))


def test_kl_is_never_negative_and_its_gradient_is_right_where_rounding_hides_its_value():
    d = jnp.asarray(np.concatenate([[0.0, -0.0], np.random.default_rng(0).normal(size=2000) * 1e-4]), jnp.float32)
    kl = jax.jit(losses.k3)(jnp.zeros_like(d), d)
    assert (kl >= 0).all()
    assert not np.signbit(kl).any()
    exact = np.asarray(d, np.float64)
    np.testing.assert_allclose(kl, exact**2 / 2, atol=1e-10)
    gradient = jax.grad(lambda lp: losses.k3(lp, d).sum())(jnp.zeros_like(d))
    np.testing.assert_allclose(gradient, -np.expm1(exact), rtol=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo-token"])
def test_tokens_sampled_by_older_weights_count_by_their_importance_up_to_the_cap(algorithm):
    """NumPy, float64: weights of the mean over tokens times min(exp(old - sampler), cap), for the gain and for the KL
    penalty; the clipped ratio is to the old weights."""
    rng = np.random.default_rng(0)
    lengths, advantages, cap, beta = [3, 5], [1.0, -0.5], 1.2, 0.3
    n = sum(lengths)
    lp, old, reference = (rng.normal(-2, 0.5, n) for _ in range(3))
    sampler = old + np.resize([-0.6, 0.3, -0.1], n)
    batch = make_batch(
        lengths,
        advantages,
        old_logprobs=jnp.asarray(old[None], jnp.float32),
        sampler_logprobs=jnp.asarray(sampler[None], jnp.float32),
        reference_logprobs=jnp.asarray(reference[None], jnp.float32),
    )
    options = LossOptions(algorithm=algorithm, aggregation="token-mean", beta=beta, importance_cap=cap)
    step = Denominators(2.0, float(n), float(n))
    loss, metrics = losses.loss(options, jnp.asarray(lp[None], jnp.float32), jnp.zeros((1, n)), batch, step)

    owners = np.repeat([0, 1], lengths)
    token_ratio = np.exp(lp - old)
    means = np.array([(lp - old)[owners == i].mean() for i in (0, 1)])
    ratio = token_ratio if algorithm == "grpo" else np.exp(means[owners])
    a = np.asarray(advantages)[owners]
    gain = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    log_r = reference - lp
    penalty = beta * token_ratio * (np.exp(log_r) - log_r - 1)
    importance = np.exp(old - sampler)
    assert (importance > cap).any()
    assert (importance < cap).any()
    weights = np.minimum(importance, cap)
    assert float(loss) == pytest.approx(np.mean(weights * (penalty - gain)), rel=1e-5)
    assert float(metrics["importance_weight"]) == pytest.approx(weights.mean(), rel=1e-5)
    assert float(metrics["importance_truncated"]) == pytest.approx((importance > cap).mean(), rel=1e-5)


def test_the_importance_of_tokens_is_a_number_not_a_function_of_the_weights():
    """Without old logprobs π_old is the current policy, whose logprobs must not be differentiated as that."""
    batch = make_batch([4], [1.0], sampler_logprobs=jnp.full((1, 4), -1.5))
    lp, step = jnp.full((1, 4), -1.0), Denominators(1.0, 4.0, 4.0)
    weighted = LossOptions(aggregation="token-mean", importance_cap=10.0)
    gradient = jax.grad(lambda x: value(weighted, x, batch, step))(lp)
    np.testing.assert_allclose(gradient, -np.exp(0.5) / 4, rtol=1e-6)
