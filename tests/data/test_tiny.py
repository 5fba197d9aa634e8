"""The embedded model's tokenizer: one token a word, exact for any text; the shipped files are those made
here."""

import json
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data import arithmetic, tiny
from burnish.data.templates import PromptTemplate
from burnish.data.tokenizer import load_tokenizer

SHIPPED = Path(str(resources.files("burnish") / "assets" / "tiny"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.write_tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def test_prompts_and_solutions_of_the_builtin_data_are_short(tokenizer):
    problems = arithmetic.generate("train", 1000, 5)
    template = PromptTemplate.load("gsm8k_rl.json")
    prompts = tokenizer.render_prompts([template.render(p.question) for p in problems])
    assert max(len(p.token_ids) for p in prompts) <= 64
    assert max(len(tokenizer.encode_completion(arithmetic.solution(p))) for p in problems) <= 32


def test_words_of_the_builtin_data_are_single_tokens(tokenizer):
    bytes_used = {
        i
        for demonstration in arithmetic.demonstrations("train", 1000, 5, careless=True)
        for i in tokenizer.encode(demonstration.question + "\n" + demonstration.answer)
        if len(tokenizer.hf.convert_ids_to_tokens(i)) == 1
    }
    letters = {i for i in bytes_used if tokenizer.hf.convert_ids_to_tokens(int(i)).isalpha()}
    # The one-letter pieces left are the blank before a number (spelled Ġ) and the line break (Ċ).
    assert {tokenizer.hf.convert_ids_to_tokens(int(i)) for i in letters} <= {"Ġ", "Ċ"}


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_decodes_to_itself(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_number_is_the_same_token_wherever_it_stands(tokenizer):
    (twelve,) = tokenizer.encode("12")
    for text in ("has 12 apples", "12 + 3 = 15", "<answer>12</answer>"):
        assert twelve in tokenizer.encode(text)


def test_the_chat_template_begins_once_and_ends_turns(tokenizer):
    begin, end = (tiny.SPECIAL_TOKENS.index(t) for t in ("<|begin|>", "<|end|>"))
    ids = tokenizer.render_prompt("How many?").token_ids
    assert ids.count(begin) == 1
    assert ids[0] == begin
    assert tokenizer.stop_token_ids == (end,)
    assert tokenizer.end_of_turn_id == end


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_the_shipped_files_are_those_that_are_made(directory, name):
    assert json.loads((SHIPPED / name).read_text()) == json.loads((directory / name).read_text())


def test_the_shipped_chat_template_is_the_one_that_is_made(directory):
    assert (SHIPPED / "chat_template.jinja").read_text() == (directory / "chat_template.jinja").read_text()
