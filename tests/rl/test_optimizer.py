import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_rl

from burnish.rl.optimizer import OptimizerOptions, apply_gradients, init_state
from burnish.rl.schedule import LearningRate, learning_rate


def constant(lr):
    """A rate that stays within 1e-9 of its peak for the few updates of a test."""
    return LearningRate(lr, 0, 10**9)


def gradients(seed, params, scale=1.0):
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(treedef, [jnp.float32(scale * rng.normal(size=p.shape)) for p in leaves])


def test_warm_up_peaks_at_its_end_and_the_cosine_ends_at_zero():
    lr = learning_rate(3e-6, 0.1, 500)
    assert float(lr(50)) == pytest.approx(3e-6)
    assert float(lr(500)) == pytest.approx(0, abs=1e-12)
    values = np.array([float(lr(n)) for n in range(500)])
    assert (values > 0).all()
    assert (np.diff(values[:51]) > 0).all()
    assert (np.diff(values[50:]) <= 0).all()
    assert lr.corner_points()[1] == (50, pytest.approx(3e-6))


def test_a_schedule_longer_than_the_run_is_cut_off_not_squeezed():
    assert float(learning_rate(1.0, 0.1, 50, 100)(50)) == pytest.approx(float(learning_rate(1.0, 0.1, 100)(50)))
    with pytest.raises(ValueError, match="at least 1"):
        learning_rate(1.0, 0.1, 0)


def test_adamw_equals_its_formula_in_float64():
    options = OptimizerOptions(constant(0.01), b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, clip=0.5)
    params = tiny_rl.params()
    state = init_state(options, params)
    expected = jax.tree.map(np.float64, params)
    m = v = jax.tree.map(np.zeros_like, expected)
    for t in range(1, 4):
        grads = gradients(t, params)
        norm = np.sqrt(sum(np.square(np.float64(g)).sum() for g in jax.tree.leaves(grads)))
        g = jax.tree.map(lambda g, n=norm: np.float64(g) * min(1, 0.5 / n), grads)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)

        def update(path, p, m, v, t=t):
            name = jax.tree_util.keystr(path)
            decay = 0 if "norm" in name else 0.1
            return p - 0.01 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8) + decay * p)

        expected = jax.tree.map_with_path(update, expected, m, v)
        state, metrics = jax.jit(lambda s, g: apply_gradients(options, s, g))(state, grads)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert tiny_rl.largest_difference(state.params, expected) < 1e-5
    assert float(metrics["changed_fraction"]) > 0.9


def test_adafactor_takes_steps_of_the_learning_rates_size():
    options = OptimizerOptions(constant(0.01), kind="adafactor", clip=0.0)
    params = tiny_rl.params()
    _, metrics = apply_gradients(options, init_state(options, params), gradients(0, params))
    size = sum(p.size for p in jax.tree.leaves(params))
    assert 0.5 * 0.01 < float(metrics["update_norm"]) / np.sqrt(size) <= 0.011


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count(bad, kind):
    options = OptimizerOptions(constant(0.01), kind=kind)
    params = tiny_rl.params()
    state, _ = apply_gradients(options, init_state(options, params), gradients(0, params))
    grads = gradients(1, params)
    grads["final_norm"] = grads["final_norm"].at[3].set(bad)
    after, metrics = apply_gradients(options, state, grads)
    for name in ("params", "opt_state", "step"):
        assert all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(getattr(state, name)), jax.tree.leaves(getattr(after, name)), strict=True)
        )
    assert (int(after.skipped), int(after.skipped_in_a_row)) == (1, 1)
    assert float(metrics["changed_fraction"]) == 0
    good, _ = apply_gradients(options, after, gradients(2, params))
    assert (int(good.skipped), int(good.skipped_in_a_row)) == (1, 0)


def test_stochastic_rounding_is_right_on_average():
    """An update of a hundredth of a bfloat16 step is lost by rounding to nearest, and kept on average here."""
    params = {"w": jnp.ones((100, 100), jnp.bfloat16)}
    step = 2.0**-7
    options = OptimizerOptions(constant(step / 100), clip=0.0)
    state = init_state(options, params)
    run = jax.jit(lambda s, g: apply_gradients(options, s, g))
    for _ in range(10):
        state, metrics = run(state, {"w": -jnp.ones((100, 100))})
    assert state.params["w"].dtype == jnp.bfloat16
    assert jax.tree.leaves(state.opt_state)[-1].dtype == jnp.float32
    moved = float(jnp.mean(state.params["w"].astype(jnp.float32))) - 1
    assert moved == pytest.approx(10 * step / 100, rel=0.2)
    assert 0.001 < float(metrics["changed_fraction"]) < 0.05


def test_mu_dtype_is_the_first_moments():
    options = OptimizerOptions(constant(0.01), mu_dtype=jnp.bfloat16)
    state = init_state(options, tiny_rl.params())
    assert state.opt_state.mu["embed"].dtype == jnp.bfloat16
    assert state.opt_state.nu["embed"].dtype == jnp.float32
