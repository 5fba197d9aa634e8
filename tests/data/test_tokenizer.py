"""Rendered prompts have the ids that the chat template gives; stop tokens are the union of all that name
one."""

import json

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, processors

from burnish.data.errors import DataError
from burnish.data.tokenizer import load_tokenizer

SPECIAL = {"<unk>": 0, "<bos>": 1, "<eos>": 2, "<turn>": 3, "<end>": 4}
WORDS = {w: i + len(SPECIAL) for i, w in enumerate(["user", "model", "say", "hello", "how", "many", "apples"])}
CHATML = (
    "{% for m in messages %}<turn>{{ m['role'] }} {{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>model{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
NO_GENERATION_PROMPT = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def make(tmp_path):
    def make(template=None, adds_bos=False, adds_eos=False, pad="<eos>", config=None, generation_config=None):
        tokenizer = RustTokenizer(models.WordLevel({**SPECIAL, **WORDS}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(list(SPECIAL))
        if adds_bos or adds_eos:
            begin, end = "<bos> " * adds_bos, " <eos>" * adds_eos
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{begin}$A{end}", pair=f"{begin}$A $B{end}", special_tokens=[("<bos>", 1), ("<eos>", 2)]
            )
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": pad,
        }
        if template:
            settings["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        for name, content in (("config.json", config), ("generation_config.json", generation_config)):
            if content is not None:
                (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return make


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(("template", "num_bos"), [(CHATML, 0), (WITH_BOS, 1)])
def test_prompt_ids_are_those_of_the_chat_template(make, template, num_bos, adds_bos):
    tokenizer = load_tokenizer(make(template, adds_bos))
    prompt = tokenizer.render_prompt("how many apples")
    expected = tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": "how many apples"}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert list(prompt.token_ids) == list(expected)
    assert prompt.token_ids.count(SPECIAL["<bos>"]) == num_bos
    assert prompt.token_ids[-1] != SPECIAL["<eos>"]
    assert prompt.text.endswith("<turn>model")


@pytest.mark.parametrize("adds_bos", [False, True])
def test_encoding_a_text_adds_no_special_token(make, adds_bos):
    tokenizer = load_tokenizer(make(CHATML, adds_bos))
    assert tokenizer.encode("say hello") == [WORDS["say"], WORDS["hello"]]


@pytest.mark.parametrize(("adds_bos", "text", "num_bos"), [
    (True, "how many", 1), (True, "<bos> how many", 1), (False, "how many", 0), (False, "<bos> how many", 1),
])  # fmt: skip
def test_a_text_to_be_continued_begins_with_bos_once_and_does_not_end(make, adds_bos, text, num_bos):
    tokenizer = load_tokenizer(make(adds_bos=adds_bos, adds_eos=True))
    bos, eos = SPECIAL["<bos>"], SPECIAL["<eos>"]
    assert eos in tokenizer.hf.encode(text)
    ids = tokenizer.encode_prompt(text)
    assert ids.count(bos) == num_bos
    assert ids[num_bos:] == [WORDS["how"], WORDS["many"]]


def test_prompts_rendered_together_equal_those_rendered_alone(make):
    tokenizer = load_tokenizer(make(WITH_BOS))
    texts = ["hello", "how many apples", "say"]
    assert tokenizer.render_prompts(texts) == [tokenizer.render_prompt(text) for text in texts]
    assert tokenizer.render_prompts([]) == []


def test_a_prompt_that_ends_with_eos_is_an_error(make):
    tokenizer = load_tokenizer(make(NO_GENERATION_PROMPT))
    with pytest.raises(DataError, match="ends with the end-of-text token"):
        tokenizer.render_prompt("hello")


def test_without_a_chat_template_rendering_is_an_error_that_says_what_to_give(make):
    tokenizer = load_tokenizer(make(None))
    assert not tokenizer.has_chat_template
    with pytest.raises(DataError, match="chat_template_path"):
        tokenizer.render_prompt("hello")


def test_chat_template_path_gives_or_replaces_the_template(make, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0]['content'] }} say", encoding="utf-8")
    for template in (None, CHATML):
        tokenizer = load_tokenizer(make(template), chat_template_path=file)
        assert list(tokenizer.render_prompt("hello").token_ids) == [WORDS["hello"], WORDS["say"]]


def test_an_absent_chat_template_file_is_an_error(make, tmp_path):
    with pytest.raises(DataError, match=r"chat_template_path=.*absent\.jinja"):
        load_tokenizer(make(CHATML), chat_template_path=tmp_path / "absent.jinja")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"What is 1 + 1?", "leaves out what the user says; a rendered chat is 'What is 1 \\+ 1\\?'"),
        (b"{% for m in messages %}", "fails: TemplateSyntaxError: Unexpected end of template"),
        (b"{{ raise_exception('no users here') }}", "fails: TemplateError: no users here"),
        (b"{{ 1 + messages }}", "fails: TypeError"),
    ],
)
def test_a_chat_template_that_fails_or_leaves_out_the_question_is_an_error_that_names_it(make, tmp_path, source, said):
    file = tmp_path / "mine.jinja"
    file.write_bytes(source)
    with pytest.raises(DataError, match=rf"chat_template_path=.*mine\.jinja: {said}"):
        load_tokenizer(make(CHATML), chat_template_path=file).render_prompt("hello")
    with pytest.raises(DataError, match=rf"the chat template of .*: {said}"):
        load_tokenizer(make(source.decode())).render_prompt("hello")


def test_a_chat_template_that_is_not_utf8_is_an_error(make, tmp_path):
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"mine\.jinja: not UTF-8 text, byte 0 is 0xff"):
        load_tokenizer(make(CHATML), chat_template_path=tmp_path / "mine.jinja")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[1]", r"expected a JSON object, it holds \[1\]"),
        ('{"eos_token_id": "x"}', "eos_token_id='x' is refused; expected a token id from 0 to 11"),
        ('{"eos_token_id": [2, 12]}', r"eos_token_id=\[2, 12\] is refused"),
        ('{"eos_token_id": true}', "eos_token_id=True is refused"),
        ('{"eos_token_id": -1}', "eos_token_id=-1 is refused"),
    ],
)
def test_generation_settings_that_name_no_token_are_errors(make, tmp_path, text, said):
    make(CHATML)
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=rf"generation_config\.json: {said}"):
        load_tokenizer(tmp_path)


def test_a_config_whose_end_token_is_no_number_is_an_error(make):
    with pytest.raises(DataError, match="eos_token_id"):
        load_tokenizer(make(CHATML, config={"model_type": "llama", "eos_token_id": "x"}))


def test_a_models_vocabulary_may_be_larger_than_the_tokenizers(make):
    config = {"model_type": "llama", "vocab_size": 64, "eos_token_id": 63}
    assert 63 in load_tokenizer(make(CHATML, config=config)).stop_token_ids


def test_a_directory_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(DataError, match="tokenizer_path="):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "config", "generation_config", "stops"),
    [
        (None, None, None, {2}),
        (CHATML, None, None, {2, 4}),
        (CHATML, {"eos_token_id": 5}, None, {2, 4, 5}),
        (CHATML, {"eos_token_id": [5, 6]}, {"eos_token_id": [7, 2]}, {2, 4, 5, 6, 7}),
        (None, {"eos_token_id": None}, {"eos_token_id": 9}, {2, 9}),
        (None, {}, {}, {2}),
    ],
)
def test_stop_tokens_are_the_union_of_all_places_that_name_one(make, template, config, generation_config, stops):
    config = config if config is None else {"model_type": "llama", **config}
    tokenizer = load_tokenizer(make(template, config=config, generation_config=generation_config))
    assert set(tokenizer.stop_token_ids) == stops


def test_stop_tokens_of_the_model_count_where_the_tokenizer_lies_elsewhere(make, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 8]}', encoding="utf-8")
    tokenizer = load_tokenizer(make(CHATML), model_path=model)
    assert set(tokenizer.stop_token_ids) == {2, 4, 8}


def test_a_completion_to_learn_from_ends_its_turn_also_where_pad_equals_eos(make):
    assert load_tokenizer(make(CHATML)).encode_completion("hello") == [WORDS["hello"], SPECIAL["<end>"]]
    assert load_tokenizer(make(None, pad="<eos>")).encode_completion("hello") == [
        WORDS["hello"],
        SPECIAL["<eos>"],
    ]
