from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_rl

from burnish.rl.losses import LossOptions
from burnish.rl.optimizer import OptimizerOptions
from burnish.rl.packing import pack, pack_examples
from burnish.rl.schedule import LearningRate
from burnish.rl.update import NonFiniteGradientsError, Updater, with_logprobs

MODES = ["sequence-mean-token-mean", "token-mean", "sequence-mean"]


def rollouts(seed=0):
    groups = tiny_rl.groups(4, 4, seed)
    rng = np.random.default_rng(seed)
    advantages = rng.normal(size=(4, 4))
    advantages[1] = 0
    valid = np.ones((4, 4), bool)
    valid[2, 1] = valid[3, 3] = False
    return groups, advantages, valid


def gradient(updater, params, packed):
    """The gradient that the optimizer gets."""
    grads = [updater._gradients(params, b, packed.denominators)[0] for b in packed.micro_batches]
    return jax.tree.map(lambda *g: sum(g), *grads)


@pytest.mark.parametrize("aggregation", MODES)
def test_gradient_equals_one_completion_at_a_time(aggregation):
    groups, advantages, valid = rollouts()
    options = LossOptions(aggregation=aggregation)
    params = tiny_rl.params()
    expected = jax.grad(tiny_rl.plain_loss)(params, groups, advantages, valid, options, 0.8)
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options(loss=options, temperature=0.8))
    got = gradient(updater, params, pack(groups, advantages, valid, max_tokens=128))
    assert tiny_rl.largest_difference(got, expected) < 1e-5


@pytest.mark.parametrize("algorithm", ["grpo", "gspo-token"])
def test_second_pass_and_penalty_equal_one_completion_at_a_time(algorithm):
    groups, advantages, valid = rollouts()
    narrow = 1.0 if algorithm == "grpo" else 0.05  # means over a completion move less than tokens
    options = LossOptions(algorithm, beta=0.1, epsilon_low=0.05 * narrow, epsilon_high=0.1 * narrow)
    params, old, reference = tiny_rl.params(0), tiny_rl.params(0), tiny_rl.params(0)
    old["layers"]["up_proj"] = 1.03 * old["layers"]["up_proj"]
    reference["embed"] = 1.05 * reference["embed"]
    expected, expected_grad = jax.value_and_grad(tiny_rl.plain_loss)(
        params, groups, advantages, valid, options, old=old, reference=reference
    )
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options(loss=options))
    packed = pack(groups, advantages, valid, max_tokens=128, keep_zero_advantages=True)
    packed = with_logprobs(packed, old=updater.logprobs(old, packed), reference=updater.logprobs(reference, packed))
    assert tiny_rl.largest_difference(gradient(updater, params, packed), expected_grad) < 1e-5
    _, metrics, _ = updater.step(updater.init(params), packed)
    assert float(metrics["loss"]) == pytest.approx(float(expected), abs=1e-5)
    assert float(metrics["clip_fraction"]) > 0


# Token losses are aggregated in one way, whatever the algorithm that they come from.
@pytest.mark.parametrize(("algorithm", "aggregation"), [*(("grpo", mode) for mode in MODES), ("gspo-token", MODES[0])])
def test_result_is_the_same_for_any_split_order_and_packing(algorithm, aggregation):
    groups, advantages, valid = rollouts()
    options = LossOptions(algorithm=algorithm, aggregation=aggregation)
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options(loss=options))
    params = tiny_rl.params()
    whole = pack(groups, advantages, valid, max_tokens=512)
    assert len(whole.micro_batches) == 1
    expected = gradient(updater, params, whole)
    order = [2, 0, 3, 1]
    flipped = [replace(groups[i], completions=groups[i].completions[::-1]) for i in order]
    ways = {
        "2 micro-batches": pack(groups, advantages, valid, max_tokens=128),
        "4 micro-batches": pack(groups, advantages, valid, max_tokens=512, max_groups=1),
        "5 micro-batches": pack(groups, advantages, valid, max_tokens=1, max_groups=1),  # as long as the longest needs
        "2 rows": pack(groups, advantages, valid, max_tokens=128, rows=2),
        "another order": pack(flipped, advantages[order][:, ::-1], valid[order][:, ::-1], max_tokens=512),
        "zeros kept": pack(groups, advantages, valid, max_tokens=512, keep_zero_advantages=True),
    }
    assert len(ways["5 micro-batches"].micro_batches) == 5
    for way, packed in ways.items():
        assert tiny_rl.largest_difference(gradient(updater, params, packed), expected) < 1e-5, way


def test_masked_completions_leave_the_loss_of_the_others():
    groups, advantages, _ = rollouts()
    valid = np.tile([True, False, True, False], (4, 1))
    alone = [replace(g, completions=g.completions[::2]) for g in groups]
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options())
    params = tiny_rl.params()
    with_masked = pack(groups, advantages, valid, max_tokens=512)
    without = pack(alone, advantages[:, ::2], np.ones((4, 2), bool), max_tokens=512)
    assert tiny_rl.largest_difference(gradient(updater, params, with_masked), gradient(updater, params, without)) < 1e-6


def test_a_step_with_nothing_to_train_has_gradient_zero_and_is_no_error():
    groups, advantages, valid = rollouts()
    for packed in (
        pack(groups, advantages, ~valid & valid, max_tokens=64),
        pack(groups, 0 * advantages, valid, max_tokens=64),
    ):
        updater = Updater(tiny_rl.SPEC, tiny_rl.update_options())
        state, metrics, _ = updater.step(updater.init(tiny_rl.params()), packed)
        assert float(metrics["grad_norm"]) == 0
        assert tiny_rl.largest_difference(state.params, tiny_rl.params()) == 0


def test_the_penalty_moves_weights_when_all_advantages_are_zero():
    groups, advantages, valid = rollouts()
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options(loss=LossOptions(beta=0.1)))
    packed = pack(groups, 0 * advantages, valid, max_tokens=512, keep_zero_advantages=True)
    packed = with_logprobs(packed, reference=updater.logprobs(tiny_rl.params(1), packed))
    state, metrics, _ = updater.step(updater.init(tiny_rl.params()), packed)
    assert float(metrics["kl"]) > 0
    assert tiny_rl.largest_difference(state.params, tiny_rl.params()) > 1e-4


@pytest.mark.parametrize("remat", ["full", "minimal"])
def test_rematerialisation_does_not_change_the_gradient(remat):
    groups, advantages, valid = rollouts()
    packed = pack(groups, advantages, valid, max_tokens=512)
    params = tiny_rl.params()
    expected = gradient(Updater(tiny_rl.SPEC, tiny_rl.update_options(remat="none")), params, packed)
    got = gradient(Updater(tiny_rl.SPEC, tiny_rl.update_options(remat=remat)), params, packed)
    assert tiny_rl.largest_difference(got, expected) < 1e-6


def test_logprobs_of_the_first_pass_are_the_old_logprobs_of_the_second():
    groups, advantages, valid = rollouts()
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options())
    packed = pack(groups, advantages, valid, max_tokens=512)
    before = updater.logprobs(tiny_rl.params(), packed)
    state, metrics, seen = updater.step(updater.init(tiny_rl.params()), packed)
    assert tiny_rl.largest_difference(before, seen) < 1e-6
    assert float(metrics["ratio_mean"]) == pytest.approx(1)
    _, metrics, _ = updater.step(state, with_logprobs(packed, old=seen))
    assert abs(float(metrics["ratio_mean"]) - 1) > 1e-5


def test_difference_to_the_samplers_logprobs_is_measured():
    groups, advantages, valid = rollouts()
    params = tiny_rl.params()
    exact = [
        replace(
            g,
            completions=tuple(
                tiny_rl.completion(c.token_ids, tiny_rl.row_logprobs(params, g.prompt.token_ids, c.token_ids, 0.8))
                for c in g.completions
            ),
        )
        for g in groups
    ]
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options(temperature=0.8))
    _, metrics, _ = updater.step(updater.init(tiny_rl.params()), pack(exact, advantages, valid, max_tokens=512))
    assert float(metrics["logprob_difference_max"]) < 1e-4
    wrong = Updater(tiny_rl.SPEC, tiny_rl.update_options(temperature=1.0))
    _, metrics, _ = wrong.step(wrong.init(tiny_rl.params()), pack(exact, advantages, valid, max_tokens=512))
    assert float(metrics["logprob_difference_mean"]) > 0.01


def test_pads_and_neighbours_do_not_change_logprobs():
    groups, advantages, valid = rollouts()
    spec = replace(tiny_rl.SPEC, tied_head=False)
    params = tiny_rl.params(spec=spec)
    params["embed"] = params["embed"].at[0].set(1e3)
    updater = Updater(spec, tiny_rl.update_options())
    for max_tokens in (30, 128, 512):
        packed = pack(groups, advantages, valid, max_tokens=max_tokens)
        found = {}
        for batch, lp in zip(packed.micro_batches, updater.logprobs(params, packed), strict=True):
            for s in set(batch.sequences[batch.trained].tolist()):
                mine = batch.trained & (batch.sequences == s)
                found[tuple(batch.targets[mine])] = np.asarray(lp)[mine]
        for g, row, oks in zip(groups, advantages, valid, strict=True):
            for c, a, ok in zip(g.completions, row, oks, strict=True):
                if ok and a:
                    alone = tiny_rl.row_logprobs(params, g.prompt.token_ids, c.token_ids, spec=spec)
                    np.testing.assert_allclose(found[tuple(c.token_ids)], alone, atol=1e-5)


def test_gradient_equals_a_finite_difference():
    groups, advantages, valid = rollouts()
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options(loss=LossOptions(algorithm="cross-entropy")))
    packed = pack(groups, advantages, valid, max_tokens=512)
    params = tiny_rl.params()
    grads = gradient(updater, params, packed)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda p: jnp.float32(rng.normal(size=p.shape)), params)

    def at(t):
        moved = jax.tree.map(lambda p, d: p + t * d, params, direction)
        return float(updater._gradients(moved, packed.micro_batches[0], packed.denominators)[1]["loss"])

    slope = (at(1e-3) - at(-1e-3)) / 2e-3
    expected = sum(
        float(jnp.sum(g * d)) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
    )
    assert slope == pytest.approx(expected, rel=2e-2)


def test_cross_entropy_of_examples_counts_completion_tokens_only():
    examples = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9])]
    options = LossOptions(algorithm="cross-entropy", aggregation="token-mean")
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options(loss=options))
    params = tiny_rl.params()
    expected = -sum(float(tiny_rl.row_logprobs(params, p, c).sum()) for p, c in examples) / 5
    _, metrics, _ = updater.step(updater.init(params), pack_examples(examples, max_tokens=64))
    assert float(metrics["loss"]) == pytest.approx(expected, abs=1e-5)


def test_the_same_shapes_compile_once():
    groups, advantages, valid = rollouts()
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options())
    packed = pack(groups, advantages, valid, max_tokens=128)
    state, _, _ = updater.step(updater.init(tiny_rl.params()), packed)
    compiled = updater.num_compilations
    for _ in range(2):
        state, _, _ = updater.step(state, packed)
    assert updater.num_compilations == compiled


def test_updates_are_bitwise_reproducible():
    groups, advantages, valid = rollouts()
    packed = pack(groups, advantages, valid, max_tokens=128)

    def run(times, updater, state):
        for _ in range(times):
            state, _, _ = updater.step(state, packed)
        return state

    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options())
    straight = run(6, updater, updater.init(tiny_rl.params()))
    half = run(3, updater, updater.init(tiny_rl.params()))
    saved = jax.tree.map(np.array, half)
    resumed = run(3, Updater(tiny_rl.SPEC, tiny_rl.update_options()), jax.tree.map(jnp.asarray, saved))
    assert tiny_rl.largest_difference(straight, resumed) == 0


def test_a_run_of_gradients_that_are_not_finite_ends_in_an_error():
    groups, advantages, valid = rollouts()
    optimizer = OptimizerOptions(LearningRate(1e-2, 0, 100))
    updater = Updater(tiny_rl.SPEC, tiny_rl.update_options(optimizer=optimizer, max_skipped_in_a_row=3))
    params = tiny_rl.params()
    params["final_norm"] = params["final_norm"].at[0].set(jnp.nan)
    state = updater.init(params)
    packed = pack(groups, advantages, valid, max_tokens=512)
    for n in (1, 2):
        state, metrics, _ = updater.step(state, packed)
        assert int(metrics["skipped_updates"]) == n
    with pytest.raises(NonFiniteGradientsError, match="3 updates in a row"):
        updater.step(state, packed)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="decode_sampling_temperature"):
        tiny_rl.update_options(temperature=0.0)
