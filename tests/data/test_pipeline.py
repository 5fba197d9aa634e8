"""Batches of prompts: order from the seed, exact resume, long prompts left out and counted."""

import json

import pytest

from burnish.data import arithmetic, tiny
from burnish.data.errors import DataError
from burnish.data.pipeline import PromptPipeline
from burnish.data.templates import PromptTemplate
from burnish.data.tokenizer import load_tokenizer
from burnish.data.types import Example

EXAMPLES = arithmetic.generate("train", 50, 0)
TEMPLATE = PromptTemplate.load("gsm8k_rl.json")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(tiny.write_tiny_base(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def make(tokenizer):
    def make(examples=EXAMPLES, max_prompt_tokens=256, batch_size=8, seed=7, num_epochs=1, **options):
        return PromptPipeline(examples, TEMPLATE, tokenizer, max_prompt_tokens, batch_size, seed, num_epochs, **options)

    return make


def indices(batches):
    return [[prompt.index for prompt in batch] for batch in batches]


def flat(batches):
    return [index for batch in indices(batches) for index in batch]


def lengths(tokenizer):
    return [len(r.token_ids) for r in tokenizer.render_prompts([TEMPLATE.render(e.question) for e in EXAMPLES])]


def test_an_epoch_has_every_prompt_once_in_an_order_set_by_the_seed(make):
    order = flat(make(batch_size=10))
    assert sorted(order) == list(range(50))
    assert order != list(range(50))
    assert order == flat(make(batch_size=10))
    assert order != flat(make(batch_size=10, seed=8))
    assert flat(make(batch_size=10, shuffle=False)) == list(range(50))


def test_a_prompt_carries_its_row_and_the_ids_of_the_chat_template(make, tokenizer):
    for prompt in next(make()):
        example = EXAMPLES[prompt.index]
        rendered = tokenizer.render_prompt(TEMPLATE.render(example.question))
        assert (prompt.question, prompt.answer) == (example.question, example.answer)
        assert (prompt.text, prompt.token_ids) == (rendered.text, rendered.token_ids)


def test_each_epoch_is_shuffled_anew(make):
    order = flat(make(batch_size=10, num_epochs=3))
    epochs = [order[i : i + 50] for i in (0, 50, 100)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_run_across_epoch_ends(make):
    pipeline = make(batch_size=8, num_epochs=2)
    assert pipeline.num_batches == 100 // 8
    assert [len(batch) for batch in pipeline] == [8] * 12


def test_evaluation_keeps_the_last_batch(make):
    pipeline = make(examples=EXAMPLES[:10], batch_size=4, shuffle=False, drop_remainder=False)
    assert pipeline.num_batches == 3
    assert [len(batch) for batch in pipeline] == [4, 4, 2]


@pytest.mark.parametrize("batch_size", [8, 10])
def test_a_resumed_run_reads_what_an_uninterrupted_one_reads(make, batch_size):
    def start():
        return make(max_prompt_tokens=55, batch_size=batch_size, num_epochs=3)

    pipeline = start()
    assert pipeline.num_dropped > 0
    states, batches = [pipeline.state()], []
    for batch in pipeline:
        batches.append(batch)
        states.append(json.loads(json.dumps(pipeline.state())))
    assert len(batches) == pipeline.num_batches
    # Positions include the start, both epoch ends (batch_size divides an epoch or not) and the very end.
    for done, state in enumerate(states):
        resumed = start()
        resumed.restore(state)
        assert list(resumed) == batches[done:]


def test_a_finished_pipeline_stays_finished_after_restore(make):
    pipeline = make(batch_size=10)
    list(pipeline)
    resumed = make(batch_size=10)
    resumed.restore(pipeline.state())
    with pytest.raises(StopIteration):
        next(resumed)


def test_prompts_over_the_limit_are_left_out_and_counted(make, tokenizer):
    sizes = lengths(tokenizer)
    limit = sorted(sizes)[25]
    fitting = [i for i, size in enumerate(sizes) if size <= limit]
    pipeline = make(max_prompt_tokens=limit, batch_size=1)
    assert (pipeline.num_prompts, pipeline.num_dropped) == (len(fitting), 50 - len(fitting))
    assert pipeline.num_batches == len(fitting)
    assert sorted(flat(pipeline)) == fitting


def test_reading_only_what_a_run_needs_does_not_change_the_order(make, monkeypatch):
    monkeypatch.setattr("burnish.data.pipeline._RENDER_AT_ONCE", 4)
    whole = make(max_prompt_tokens=55, batch_size=4, num_epochs=2)
    part = make(max_prompt_tokens=55, batch_size=4, num_epochs=2, limit=12)
    assert 12 <= part.num_prompts < whole.num_prompts
    assert indices(whole) == indices(part)


def test_train_fraction_keeps_that_share_through_all_epochs(make):
    order = flat(make(batch_size=4, num_epochs=2, train_fraction=0.4))
    assert len(order) == 40
    assert len(set(order)) == 20


def test_a_prompt_of_its_own_takes_the_place_of_the_template(make, tokenizer):
    examples = [Example("q", "1", prompt="How many apples?")] * 8
    prompt = next(make(examples=examples))[0]
    assert prompt.token_ids == tokenizer.render_prompt("How many apples?").token_ids
    assert prompt.question == "q"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples": []}, "the data set is empty"),
        ({"max_prompt_tokens": 5}, "max_prefill_predict_length=5"),
        ({"batch_size": 51}, "batch_size=51 is more than the 50 prompts"),
        ({"train_fraction": 0.001}, "train_fraction=0.001 of 50 examples is none"),
    ],
)
def test_data_that_makes_no_batch_is_an_error_that_says_why(make, options, message):
    with pytest.raises(DataError) as error:
        make(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (EXAMPLES[:40], "it has 40 rows, and had 50"),
        ([*EXAMPLES[:10], Example(EXAMPLES[10].question, "0"), *EXAMPLES[11:]], "other questions or answers"),
        (EXAMPLES[::-1], "other questions or answers"),
    ],
    ids=["shorter", "another-answer", "another-order"],
)
def test_a_position_in_other_data_is_refused(make, changed, message):
    pipeline = make()
    next(pipeline)
    with pytest.raises(DataError, match=r"hf_train_files") as error:
        make(examples=changed).restore(pipeline.state())
    assert message in str(error.value)


def test_a_position_holds_for_a_run_that_reads_more_of_the_same_data(make, monkeypatch):
    monkeypatch.setattr("burnish.data.pipeline._RENDER_AT_ONCE", 4)
    short, long = make(limit=8), make(limit=24)
    next(short)
    assert short.state()["num_read"] < long.state()["num_read"]
    long.restore(json.loads(json.dumps(short.state())))
    whole = make()
    next(whole)
    assert next(long) == next(whole)
