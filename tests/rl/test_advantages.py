import numpy as np
import pytest

from burnish.rl.advantages import group_advantages

REWARDS = np.array([[1.0, 0.0], [10.0, 0.0]])
ALL = np.ones((2, 2), bool)


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("group", [[0.707, -0.707], [0.707, -0.707]]),
        ("batch", [[0.103, -0.103], [1.030, -1.030]]),
        ("none", [[0.5, -0.5], [5.0, -5.0]]),
    ],
)
def test_std_modes_give_the_worked_values(std, expected):
    np.testing.assert_allclose(group_advantages(REWARDS, ALL, std), expected, atol=5e-4)


def test_invalid_completions_do_not_change_the_others():
    rewards = np.array([[1.0, 0.0, 0.5, 99.0], [0.0, 1.0, 1.0, np.nan]])
    valid = np.array([[True, True, True, False], [True, True, True, False]])
    for std in ("group", "batch", "none"):
        got = group_advantages(rewards, valid, std)
        np.testing.assert_allclose(got[:, :3], group_advantages(rewards[:, :3], valid[:, :3], std), rtol=1e-12)
        assert (got[:, 3] == 0).all()


def test_equal_rewards_give_exactly_zero():
    rewards = np.full((1, 7), 0.1)
    for std in ("group", "batch", "none"):
        assert (group_advantages(rewards, np.ones((1, 7), bool), std) == 0).all()


def test_a_single_valid_completion_has_nothing_to_be_compared_with():
    valid = np.array([[True, False], [False, False]])
    for std in ("group", "batch", "none"):
        assert (group_advantages(REWARDS, valid, std) == 0).all()


def test_order_of_completions_does_not_matter():
    rng = np.random.default_rng(0)
    rewards, order = rng.random((3, 8)), rng.permutation(8)
    ok = np.ones((3, 8), bool)
    np.testing.assert_allclose(
        group_advantages(rewards[:, order], ok), group_advantages(rewards, ok)[:, order], rtol=1e-12
    )


def test_groups_of_one_are_refused():
    with pytest.raises(ValueError, match=r"rl\.num_generations"):
        group_advantages(np.ones((4, 1)), np.ones((4, 1), bool))


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(np.array([[1.0, np.nan]]), np.ones((1, 2), bool))
