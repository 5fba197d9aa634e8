"""The engine against the training forward pass, and its invariances: batch, slots, padding, weight updates."""

from dataclasses import replace

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_reference import (
    MAX_TOTAL,
    TINY,
    VOCAB,
    decode_text,
    log_softmax,
    make_engine,
    make_prompt,
    random_params,
    reference_logits,
    reference_logprobs,
)

from burnish.models.params import Params
from burnish.models.spec import ModelSpec, RopeSpec
from burnish.rollout import engine as engine_module
from burnish.rollout import schedule as schedule_module
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import Completion, Group, SamplingParams, StopReason

STOPS = (3, 70, 11)
SAMPLED = SamplingParams(max_total_tokens=100, temperature=0.7, top_k=20, top_p=0.9, stop_token_ids=STOPS)


@pytest.fixture(scope="module")
def params() -> Params:
    return random_params(TINY, 0)


@pytest.fixture(scope="module")
def engine(params: Params) -> BuiltinEngine:
    return make_engine(params)


def seeds_for(sizes: list[int], start: int = 0) -> list[list[int]]:
    return [[start + 100 * p + g for g in range(size)] for p, size in enumerate(sizes)]


def all_completions(groups: list[Group]) -> list[Completion]:
    return [c for g in groups for c in g.completions]


def same(a: Completion, b: Completion) -> bool:
    return (
        a.token_ids.tolist() == b.token_ids.tolist()
        and np.allclose(a.logprobs, b.logprobs, atol=1e-5)
        and a.stop_reason == b.stop_reason
    )


def check_against_forward(
    params: Params, groups: list[Group], sampling: SamplingParams, spec: ModelSpec = TINY, atol: float = 1e-4
) -> None:
    """Logprobs are right, the stop reason is what the tokens say, and no completion is too long or goes on."""
    for group in groups:
        limit = sampling.max_total_tokens - len(group.prompt.token_ids)
        for c in group.completions:
            expected = reference_logprobs(params, group.prompt, c.token_ids, sampling.temperature or 1.0, spec)
            np.testing.assert_allclose(c.logprobs, expected, atol=atol)
            stops = [i for i, t in enumerate(c.token_ids.tolist()) if t in sampling.stop_token_ids]
            if c.stop_reason is StopReason.STOP:
                assert stops == [len(c.token_ids) - 1]
            else:
                assert (c.stop_reason, len(c.token_ids), stops) == (StopReason.LENGTH, limit, [])
            assert c.text == decode_text(c.token_ids.tolist())


@pytest.mark.parametrize(
    ("prompt_lengths", "sizes"),
    [
        ([5], [1]),
        ([1], [3]),
        ([1, 40, 7, 64], [2, 2, 2, 2]),  # fills the slots exactly
        ([12, 3, 30, 1, 50, 8], [3, 3, 3, 3, 3, 3]),  # more completions than slots
        ([9, 20], [1, 5]),  # groups of different size
        ([33], [11]),  # one group larger than the batch
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_training_forward_pass(
    params: Params, engine: BuiltinEngine, prompt_lengths: list[int], sizes: list[int]
) -> None:
    prompts = [make_prompt(n, seed=i) for i, n in enumerate(prompt_lengths)]
    groups = engine.generate(prompts, seeds_for(sizes), SAMPLED)
    assert [g.prompt for g in groups] == prompts
    assert [[c.seed for c in g.completions] for g in groups] == seeds_for(sizes)
    check_against_forward(params, groups, SAMPLED)


def test_greedy_tokens_are_the_argmax_of_a_forward_pass_without_cache(params: Params, engine: BuiltinEngine) -> None:
    prompts = [make_prompt(n) for n in (1, 17, 40)]
    sampling = SamplingParams(max_total_tokens=60, temperature=0.0)
    for group in engine.generate(prompts, seeds_for([1, 1, 1]), sampling):
        (completion,) = group.completions
        tokens = list(group.prompt.token_ids)
        for token in completion.token_ids.tolist():
            assert token == reference_logits(params, tokens)[-1].argmax()
            tokens.append(token)
        assert len(tokens) == 60
        check_against_forward(params, [group], sampling)


def test_one_new_token(params: Params, engine: BuiltinEngine) -> None:
    prompts = [make_prompt(20), make_prompt(20, seed=1)]
    sampling = replace(SAMPLED, max_total_tokens=21, stop_token_ids=())
    groups = engine.generate(prompts, seeds_for([2, 2]), sampling)
    assert all(len(c.token_ids) == 1 for c in all_completions(groups))
    check_against_forward(params, groups, sampling)


def test_completions_longer_than_the_first_cache_wrap_and_grow_it(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "FIRST_COLUMNS", 16)
    prompts = [make_prompt(n) for n in (2, 25, 9)]
    sampling = replace(SAMPLED, stop_token_ids=STOPS[:1])
    groups = make_engine(params, max_slots=3).generate(prompts, seeds_for([2, 2, 2]), sampling)
    assert max(len(c.token_ids) for c in all_completions(groups)) > 32
    check_against_forward(params, groups, sampling)


def test_a_cut_batch_goes_on_as_before(params: Params, engine: BuiltinEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [make_prompt(n) for n in (1, 40, 7, 64)]
    whole = engine.generate(prompts, seeds_for([2] * 4), SAMPLED)
    monkeypatch.setattr(schedule_module, "MIN_ROWS", 1)
    cut = engine.generate(prompts, seeds_for([2] * 4), SAMPLED)
    assert all(map(same, all_completions(whole), all_completions(cut)))


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(params: Params, engine: BuiltinEngine) -> None:
    prompts = [make_prompt(n) for n in (6, 31, 2, 50)]
    together = engine.generate(prompts, seeds_for([3] * 4), SAMPLED)
    alone = engine.generate([prompts[1]], [[102]], SAMPLED)
    reversed_ = engine.generate(prompts[::-1], [s[::-1] for s in seeds_for([3] * 4)[::-1]], SAMPLED)
    few_slots = make_engine(params, max_slots=2).generate(prompts, seeds_for([3] * 4), SAMPLED)
    assert same(alone[0].completions[0], together[1].completions[2])
    for a, b in zip(together, reversed_[::-1], strict=True):
        assert all(map(same, a.completions, b.completions[::-1]))
    assert all(map(same, all_completions(together), all_completions(few_slots)))


def test_different_seeds_give_different_completions(engine: BuiltinEngine) -> None:
    groups = engine.generate([make_prompt(10)], [list(range(8))], replace(SAMPLED, stop_token_ids=()))
    assert len({tuple(c.token_ids.tolist()) for c in groups[0].completions}) == 8


def test_sampled_tokens_follow_the_models_distribution(params: Params, engine: BuiltinEngine) -> None:
    prompt = make_prompt(4)
    sampling = SamplingParams(max_total_tokens=6, temperature=1.5)
    (group,) = engine.generate([prompt], [list(range(1500))], sampling)
    first = np.bincount([c.token_ids[0] for c in group.completions], minlength=VOCAB)
    expected = 1500 * np.exp(log_softmax(reference_logits(params, prompt.token_ids)[-1] / 1.5))
    likely = expected >= 5
    chi_square = (((first - expected) ** 2 / expected)[likely]).sum()
    chi_square += (first[~likely].sum() - expected[~likely].sum()) ** 2 / expected[~likely].sum()
    degrees = likely.sum()
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)
    # The second token's number is not the first one's: given the most frequent first token it varies too.
    after = [c.token_ids[1] for c in group.completions if c.token_ids[0] == first.argmax()]
    assert len(set(after)) > 5


@pytest.mark.parametrize("stop", [1, 70])
def test_every_stop_token_stops_and_is_kept(params: Params, engine: BuiltinEngine, stop: int) -> None:
    prompts, seeds = [make_prompt(5, seed=s) for s in range(3)], seeds_for([2, 2, 2])
    free = all_completions(engine.generate(prompts, seeds, replace(SAMPLED, stop_token_ids=())))
    stopped = all_completions(engine.generate(prompts, seeds, replace(SAMPLED, stop_token_ids=(1, 70))))
    assert any(stop in c.token_ids for c in free)
    for long, short in zip(free, stopped, strict=True):
        ends = [i + 1 for i, t in enumerate(long.token_ids.tolist()) if t in (1, 70)]
        assert short.token_ids.tolist() == long.token_ids.tolist()[: ends[0] if ends else None]
        assert short.stop_reason is (StopReason.STOP if ends else StopReason.LENGTH)


def test_a_stop_token_with_the_pad_id_is_kept_and_scored(params: Params, engine: BuiltinEngine) -> None:
    """Token 0 fills unused places of the engine's arrays; as an end-of-text id it is a token like any other."""
    prompts, seeds = [make_prompt(5, seed=s) for s in range(3)], seeds_for([2, 2, 2])
    sampling = replace(SAMPLED, temperature=1.5, top_k=0, top_p=1.0, stop_token_ids=(0,))
    groups = engine.generate(prompts, seeds, sampling)
    assert any(c.stop_reason is StopReason.STOP for c in all_completions(groups))
    check_against_forward(params, groups, sampling)


def test_ignore_stop_samples_up_to_the_limit(engine: BuiltinEngine) -> None:
    sampling = replace(SAMPLED, stop_token_ids=tuple(range(VOCAB)), stop_strings=("a",), ignore_stop=True)
    groups = engine.generate([make_prompt(5), make_prompt(50)], seeds_for([2, 2]), sampling)
    assert [[len(c.token_ids) for c in g.completions] for g in groups] == [[95, 95], [50, 50]]


def test_stop_strings_cut_at_the_token_that_completes_them(engine: BuiltinEngine) -> None:
    prompts, seeds = [make_prompt(5, seed=s) for s in range(4)], seeds_for([4] * 4)
    sampling = replace(SAMPLED, stop_token_ids=(3,), temperature=1.0, top_k=0)
    free = all_completions(engine.generate(prompts, seeds, sampling))
    longest = max((c.text for c in free), key=len)
    strings = (longest[20:22], longest[33:35])
    cut = all_completions(engine.generate(prompts, seeds, replace(sampling, stop_strings=strings)))
    reasons = set()
    for long, short in zip(free, cut, strict=True):
        ends = [n for n in range(1, len(long.text) + 1) if any(s in long.text[:n] for s in strings)]
        assert short.token_ids.tolist() == long.token_ids.tolist()[: ends[0] if ends else None]
        assert len(short.logprobs) == len(short.weight_versions) == len(short.token_ids)
        assert short.text == long.text[: len(short.token_ids)]
        assert (short.stop_reason is StopReason.STOP_STRING) == bool(ends)
        reasons.add(short.stop_reason)
    assert StopReason.STOP_STRING in reasons


def test_pad_tokens_do_not_change_anything(params: Params) -> None:
    """Prefill pads on the right with token 0, idle slots read token 0: a wild embedding there changes nothing."""
    spec = replace(TINY, tied_head=False)
    base = random_params(spec, 1)
    wild = {**base, "embed": base["embed"].at[0].set(1e3)}
    prompts = [make_prompt(n) for n in (1, 5, 33)]
    sampling = replace(SAMPLED, top_k=5, stop_token_ids=())
    calm, disturbed = (
        all_completions(make_engine(p, spec).generate(prompts, seeds_for([1, 2, 2]), sampling)) for p in (base, wild)
    )
    compared = 0
    for a, b in zip(calm, disturbed, strict=True):
        # A sampled token 0 is read like any other, so what follows it differs.
        same_until = next((i + 1 for i, t in enumerate(a.token_ids.tolist()) if t == 0), len(a.token_ids))
        assert a.token_ids[:same_until].tolist() == b.token_ids[:same_until].tolist()
        np.testing.assert_allclose(a.logprobs[:same_until], b.logprobs[:same_until], atol=1e-5)
        compared += same_until
    assert compared > 50


def test_new_weights_leave_no_trace_of_the_old(params: Params) -> None:
    prompts = [make_prompt(30), make_prompt(8)]
    new = random_params(TINY, 5)
    engine = make_engine(params, version=4)
    old_groups = engine.generate(prompts, seeds_for([2, 2]), SAMPLED)
    engine.load_weights(new, version=5)
    after = engine.generate(prompts, seeds_for([2, 2]), SAMPLED)
    fresh = make_engine(new, version=5).generate(prompts, seeds_for([2, 2]), SAMPLED)
    assert all(map(same, all_completions(after), all_completions(fresh)))
    assert not any(map(same, all_completions(after), all_completions(old_groups)))
    assert {v for c in all_completions(old_groups) for v in c.weight_versions.tolist()} == {4}
    assert {v for c in all_completions(after) for v in c.weight_versions.tolist()} == {5}


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_trainer_may_give_its_arrays_away(num_layers: int) -> None:
    spec = replace(TINY, num_layers=num_layers)
    given, kept = random_params(spec, 3), random_params(spec, 3)
    engine = make_engine(given, spec)
    jax.tree.map(lambda a: a.delete(), given)
    groups = engine.generate([make_prompt(9)], [[1]], SAMPLED)
    check_against_forward(kept, groups, SAMPLED, spec)


def test_weights_from_numpy_are_copied(params: Params) -> None:
    arrays = jax.tree.map(np.array, params)
    engine = make_engine(arrays)
    jax.tree.map(lambda a: a.fill(0), arrays)
    check_against_forward(params, engine.generate([make_prompt(9)], [[1]], SAMPLED), SAMPLED)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: {**p, "lm_head": p["embed"]}, "lm_head"),
        (lambda p: {k: v for k, v in p.items() if k != "final_norm"}, "final_norm"),
        (lambda p: {**p, "embed": p["embed"][:-1]}, "embed"),
        (lambda p: {**p, "layers": {**p["layers"], "k_proj": p["layers"]["q_proj"]}}, "k_proj"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(params: Params, change, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=named):
        make_engine(change(params))


@pytest.mark.parametrize(
    "spec",
    [
        replace(TINY, tied_head=False, num_heads=6, num_kv_heads=1, attention_bias=True, mlp_bias=True),
        replace(TINY, num_kv_heads=4, rope=RopeSpec(theta=500.0, kind="llama3", factor=8.0, original_max_positions=32)),
    ],
    ids=["untied+biases+one-kv-head", "llama3-rope+no-grouping"],
)
def test_other_specs_agree_with_the_forward_pass(spec: ModelSpec) -> None:
    params = random_params(spec, 2)
    params = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(jax.random.key(1), a.shape), params)
    groups = make_engine(params, spec).generate([make_prompt(9), make_prompt(30)], seeds_for([2, 2]), SAMPLED)
    check_against_forward(params, groups, SAMPLED, spec)


def test_bfloat16_is_close_to_float32(params: Params) -> None:
    groups = make_engine(params, dtype="bfloat16").generate([make_prompt(20)], seeds_for([4]), SAMPLED)
    for completion in groups[0].completions:
        expected = reference_logprobs(params, groups[0].prompt, completion.token_ids, SAMPLED.temperature)
        assert np.abs(completion.logprobs - expected).mean() < 0.2
        assert np.isfinite(completion.logprobs).all()


def test_nothing_is_compiled_after_warm_up(params: Params) -> None:
    engine = make_engine(params)
    prompts = [make_prompt(n) for n in (40, 3, 12, 25)]
    engine.generate(prompts, seeds_for([3] * 4), SAMPLED)
    before = engine.num_compilations
    compiled: list[str] = []

    def on_event(name: str, _seconds: float, **_kwargs: str | int) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        engine.load_weights(random_params(TINY, 9), version=1)
        compiled.clear()
        for start, sampling in ((1000, SAMPLED), (2000, replace(SAMPLED, temperature=0.0, stop_token_ids=()))):
            engine.generate(prompts, seeds_for([3] * 4, start), sampling)
        # Shorter prompts reuse the shapes of longer ones.
        engine.generate([make_prompt(20, seed=i) for i in range(4)], seeds_for([3] * 4), SAMPLED)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []
    assert engine.num_compilations == before


def test_progress_is_told_between_chunks(engine: BuiltinEngine) -> None:
    told: list[tuple[int, int]] = []
    groups = engine.generate(
        [make_prompt(5)], seeds_for([3]), SAMPLED, on_progress=lambda done, tokens: told.append((done, tokens))
    )
    assert told == sorted(told)
    assert told[-1] == (3, sum(len(c.token_ids) for c in all_completions(groups)))


def test_no_prompts_give_no_groups(engine: BuiltinEngine) -> None:
    assert engine.generate([], [], SAMPLED) == []


def test_requests_beyond_the_limits_are_refused_in_words(params: Params, engine: BuiltinEngine) -> None:
    prompt = make_prompt(10)
    for prompts, seeds, sampling, words in (
        ([prompt], [], SAMPLED, "1 prompts but seeds for 0"),
        ([prompt], [[]], SAMPLED, "no seeds"),
        ([make_prompt(65)], [[1]], SAMPLED, "max_prefill_predict_length"),
        ([prompt], [[1]], replace(SAMPLED, max_total_tokens=10), "max_target_length"),
        ([prompt], [[1]], replace(SAMPLED, max_total_tokens=MAX_TOTAL + 1), "max_total_tokens"),
        ([prompt], [[1]], replace(SAMPLED, top_p=0.0), "top_p=0.0"),
        ([prompt], [[1]], replace(SAMPLED, temperature=-1.0), "temperature=-1.0"),
        ([replace(prompt, token_ids=())], [[1]], SAMPLED, "0 tokens"),
        ([replace(prompt, token_ids=(VOCAB,))], [[1]], SAMPLED, f"token id {VOCAB}"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.generate(prompts, seeds, sampling)
    unloaded = BuiltinEngine(
        TINY, decode_text, max_slots=1, max_prompt_tokens=8, max_total_tokens=16, dtype=jnp.float32
    )
    with pytest.raises(RuntimeError, match="load_weights"):
        unloaded.generate([prompt], [[1]], SAMPLED)
    for sizes in ({"max_slots": 0}, {"max_prompt_tokens": 0}, {"max_total_tokens": 300}):
        with pytest.raises(ValueError, match=next(iter(sizes))):
            BuiltinEngine(
                TINY,
                decode_text,
                **{"max_slots": 1, "max_prompt_tokens": 8, "max_total_tokens": 16, **sizes},
                dtype=jnp.float32,
            )
