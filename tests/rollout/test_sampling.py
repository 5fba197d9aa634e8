"""One row's draw against brute force in float64, exactly: the uniform number runs over a fine grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_reference import cut_probabilities

from burnish.rollout.sampling import Cuts, Way, cuts_from, sample, uniforms
from burnish.rollout.types import SamplingParams

V = 600  # more than one block of the two-level inversion, and the last one not full
GRID = 20_000

CASES = [
    {},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.7},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"top_k": 300},
    {"top_k": 300, "top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 0.999, "temperature": 1.3},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.7, "min_p": 0.3},
    {"temperature": 0.0},
]


def random_logits(seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(V) * scale).astype(np.float32)


def draw(logits: np.ndarray, numbers: np.ndarray, options: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    cuts, way = cuts_from(options, V)
    rows = jnp.broadcast_to(jnp.asarray(logits), (len(numbers), V))
    tokens, logprobs = jax.jit(sample, static_argnums=3)(rows, jnp.asarray(numbers, jnp.float32), cuts, way)
    return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drawn_frequencies_are_the_cut_distribution(case: dict) -> None:
    logits = random_logits(1)
    tokens, _ = draw(logits, (np.arange(GRID) + 0.5) / GRID, SamplingParams(10, **case))
    frequencies = np.bincount(tokens, minlength=V) / GRID
    expected = cut_probabilities(logits, **case)
    # A token owns one interval of the grid, so its count is off by less than one at each end.
    assert np.abs(frequencies - expected).max() <= 2 / GRID
    assert set(np.flatnonzero(frequencies)) <= set(np.flatnonzero(expected))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ends_of_the_unit_interval_draw_kept_tokens(case: dict) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        tokens, _ = draw(
            logits, np.array([0.0, np.nextafter(np.float32(1), np.float32(0))]), SamplingParams(10, **case)
        )
        assert (cut_probabilities(logits, **case)[tokens] > 0).all()


@pytest.mark.parametrize("case", [{"temperature": 0.5, "top_k": 3}, {"top_p": 0.5}, {"temperature": 2.0}], ids=str)
def test_logprobs_are_at_the_temperature_and_before_cuts(case: dict) -> None:
    logits = random_logits(2)
    tokens, logprobs = draw(logits, np.linspace(0, 0.999, 50), SamplingParams(10, **case))
    scaled = logits.astype(np.float64) / case.get("temperature", 1.0)
    expected = scaled - np.log(np.exp(scaled).sum())
    np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-5)


def test_temperature_scales_the_logprob_of_a_known_case() -> None:
    cuts, way = cuts_from(SamplingParams(10, temperature=0.5), 2)
    tokens, logprobs = sample(jnp.array([[2.0, 0.0]]), jnp.array([0.0]), cuts, way)
    assert tokens[0] == 0
    np.testing.assert_allclose(logprobs[0], -0.01815, atol=1e-5)


def test_greedy_takes_the_first_of_the_largest_logits_and_scores_it_at_temperature_1() -> None:
    logits = random_logits(3)
    logits[[17, 400]] = logits.max() + 1
    tokens, logprobs = draw(logits, np.array([0.0, 0.5, 0.999]), SamplingParams(10, temperature=0.0, top_p=0.5))
    assert (tokens == 17).all()
    np.testing.assert_allclose(logprobs, logits[17] - np.log(np.exp(logits.astype(np.float64)).sum()), atol=1e-5)


@pytest.mark.parametrize("width", [9000, 8197])
def test_a_wide_vocabulary_is_cut_like_a_narrow_one(width: int) -> None:
    """Wide enough for the two stages of top-k, also where the last group of entries is not full."""
    logits = (np.random.default_rng(4).standard_normal(width) * 3).astype(np.float32)
    logits[:40] = np.sort(logits)[-40:] + 1  # neighbours: the largest ones share a group
    logits[[-1, 5000]] = logits.max()
    cuts, way = cuts_from(SamplingParams(10, top_k=50, temperature=2.0), width)
    numbers = (np.arange(5000, dtype=np.float32) + 0.5) / 5000
    rows = jnp.broadcast_to(jnp.asarray(logits), (len(numbers), width))
    tokens, _ = jax.jit(sample, static_argnums=3)(rows, jnp.asarray(numbers), cuts, way)
    frequencies = np.bincount(np.asarray(tokens), minlength=width) / len(numbers)
    assert np.abs(frequencies - cut_probabilities(logits, temperature=2.0, top_k=50)).max() <= 2 / len(numbers)


@pytest.mark.parametrize("top_k", [3, 300])
def test_equal_logits_everywhere_are_no_trouble(top_k: int) -> None:
    tokens, logprobs = draw(np.zeros(V, np.float32), np.linspace(0, 0.999, 7), SamplingParams(10, top_k=top_k))
    assert ((tokens >= 0) & (tokens < V)).all()
    np.testing.assert_allclose(logprobs, -np.log(V), atol=1e-5)


@pytest.mark.parametrize("way", list(Way))
def test_logits_of_minus_infinity_are_never_drawn(way: Way) -> None:
    logits = np.full(V, -np.inf, np.float32)
    logits[[5, 300, 599]] = [0.0, 1.0, 2.0]
    cuts = Cuts(np.float32(1), np.int32(V), np.float32(1), np.float32(0))
    numbers = np.linspace(0, 1, 50, endpoint=False, dtype=np.float32)
    tokens, logprobs = sample(jnp.broadcast_to(logits, (50, V)), jnp.asarray(numbers), cuts, way)
    assert set(np.asarray(tokens).tolist()) == {5, 300, 599}
    assert np.isfinite(logprobs).all()


def test_a_uniform_depends_on_its_seed_and_token_index_only() -> None:
    for seed in (0, 3, 2**40 + 3, 2**64 - 1, -1, 2**70 + 1):
        np.testing.assert_array_equal(uniforms(seed, 5), uniforms(seed, 900)[:5])
    firsts = [float(uniforms(seed, 1)[0]) for seed in (0, 1, 2, 3, 2**32, 2**40 + 3, -1)]
    assert len(set(firsts)) == len(firsts)


def test_uniforms_over_seeds_and_indices_are_uniform() -> None:
    over_seeds = np.array([uniforms(seed, 1)[0] for seed in range(4096)])
    for values in (over_seeds, uniforms(7, 4096)):
        assert values.dtype == np.float32
        assert values.min() >= 0
        assert values.max() < 1
        counts = np.bincount((values * 16).astype(int), minlength=16)
        assert ((counts - 256) ** 2 / 256).sum() < 45  # chi-square, 15 degrees of freedom: p > 1e-4
