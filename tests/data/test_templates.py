"""Prompt templates: found by name or path, filled in one pass, free of turn markers."""

import json

import pytest

from burnish.data.errors import DataError
from burnish.data.templates import PLACEHOLDERS, PromptTemplate, builtin_names

MARKERS = ("<start_of_turn>", "<|im_start|>", "<|start_header_id|>", "<|turn>", "[INST]")


def write(path, system="Be brief.", template="{system_prompt}\n{question}"):
    path.write_text(json.dumps({"SYSTEM_PROMPT": system, "TEMPLATE": template}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", ["gsm8k_rl.json", "openmathinstruct2_rl.json"])
def test_builtin_templates_say_the_tags_and_the_question_and_no_turn_marker(name):
    text = PromptTemplate.load(name, "<r>", "</r>", "<a>", "</a>").render("How many?")
    assert "How many?" in text
    assert all(tag in text for tag in ("<r>", "</r>", "<a>", "</a>"))
    assert not any(marker in text for marker in MARKERS)
    assert not any(f"{{{placeholder}}}" in text for placeholder in PLACEHOLDERS)


def test_a_path_whose_file_is_absent_is_the_builtin_of_that_name():
    path = "maxtext/examples/chat_templates/openmathinstruct2_rl.json"
    assert PromptTemplate.load(path).render("q") == PromptTemplate.load("openmathinstruct2_rl.json").render("q")


def test_an_existing_file_comes_before_the_builtin_of_that_name(tmp_path):
    path = write(tmp_path / "gsm8k_rl.json", system="", template="mine: {question}")
    assert PromptTemplate.load(path).render("q") == "mine: q"


def test_braces_of_questions_and_latex_stay_as_they_are(tmp_path):
    path = write(tmp_path / "t.json", system=r"Use \boxed{x} and {}.", template="{system_prompt} {question}")
    question = r"{question} {system_prompt} \frac{1}{2} {reasoning_start_token}"
    assert PromptTemplate.load(path).render(question) == rf"Use \boxed{{x}} and {{}}. {question}"


def test_an_unknown_template_is_an_error_that_lists_the_builtin_ones():
    with pytest.raises(DataError, match=r"data_template_path=nothing\.json") as error:
        PromptTemplate.load("nothing.json")
    assert all(name in str(error.value) for name in builtin_names())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ('{"TEMPLATE": "{question}"}', "SYSTEM_PROMPT is missing"),
        ('{"SYSTEM_PROMPT": "", "TEMPLATE": "no placeholder"}', "TEMPLATE has no {question}"),
        (
            '{"SYSTEM_PROMPT": "", "TEMPLATE": "<start_of_turn>user\\n{question}"}',
            "turn marker <start_of_turn>",
        ),
        (
            '{"SYSTEM_PROMPT": "s", "TEMPLATE": "{sytem_prompt} {question}"}',
            "TEMPLATE has {sytem_prompt}, which nothing fills; {system_prompt} is near",
        ),
        (
            '{"SYSTEM_PROMPT": "{Reasoning_start_token}", "TEMPLATE": "{system_prompt}{question}"}',
            "{reasoning_start_token} is near",
        ),
        ('{"SYSTEM_PROMPT": "s", "TEMPLATE": "{question}"}', "TEMPLATE has no {system_prompt}"),
        ('{"SYSTEM_PROMPT": "s\xff', "not UTF-8 text, byte 20 is 0xff"),
    ],
)
def test_what_is_wrong_with_a_template_is_said(tmp_path, content, message):
    path = tmp_path / "t.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError) as error:
        PromptTemplate.load(str(path))
    assert message in str(error.value)
    assert str(path) in str(error.value)
