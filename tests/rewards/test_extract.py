"""Which answer a completion gives, and whether its tags are in the asked form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.rewards.extract import Tags, extract_answer, format_is_exact, last_boxed
from burnish.rewards.types import RewardError

TAGS = Tags()


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<reasoning>6*7</reasoning>\n<answer>42</answer>", "42"),
        ("<answer>41</answer> no, <answer>42</answer>", "42"),
        ("<answer> 42\n</answer>", " 42\n"),
        ("<answer>so <answer>42</answer>", "42"),
        ("<answer></answer>", ""),
        ("<answer>\\boxed{42}</answer>", "42"),
        ("<answer>the sum is 40+2\n#### 42</answer>", "42"),
        ("<reasoning>\\boxed{41} #### 40</reasoning><answer>42</answer>", "42"),
        ("\\boxed{41} and \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{42} then \\boxed{4", "42"),
        ("so #### 42", "42"),
        ("#### 41\n#### 42\nbecause", "42"),
        ("#### 42" + " and so on" * 60, "42"),
        ("#### 42\n" + "x" * 600, "42"),
        ("#### 42" + "." * 600, "42"),
        ("#### 42" + "x" * 600, "42"),
        ("#### $1,234.50.", "$1,234.50"),
        ("#### 42x + 3", "42x + 3"),
        ("#### -3 is it", "-3"),
        ("#### 1/2", "1/2"),
        ("\\boxed{41} #### 42", "41"),
        ("<reasoning>\\boxed{41}</reasoning> #### 42", "42"),
    ],
)
def test_the_answer_is_the_last_tag_else_the_last_box_else_what_follows_hashes(completion, answer):
    assert extract_answer(completion, TAGS) == answer


@pytest.mark.parametrize(
    "completion", ["", "the answer is 42", "\\boxed{42} <answer>42", "<reasoning>#### 42</reasoning><answer>"]
)
def test_no_answer_and_an_answer_tag_that_is_never_closed_are_no_answer(completion):
    assert extract_answer(completion, TAGS) is None


def test_other_tags_can_be_configured():
    tags = Tags("<think>", "</think>", "[[", "]]")
    assert extract_answer("<think>[1]</think>[[42]] <answer>41</answer>", tags) == "42"
    assert format_is_exact("<think>six sevens</think>[[42]]", tags)


def test_empty_and_equal_tags_are_refused_by_name():
    with pytest.raises(RewardError, match="solution_end_token is empty"):
        Tags(solution_end=" ")
    with pytest.raises(RewardError, match="four different"):
        Tags(reasoning_end="<reasoning>")


@pytest.mark.parametrize(
    ("completion", "exact"),
    [
        ("<reasoning>a</reasoning><answer>4</answer>", True),
        ("Sure! <reasoning>a\nb</reasoning>\nthen\n<answer>\n4\n</answer> bye", True),
        ("<reasoning>a</reasoning><answer>4</answer><answer>4</answer>", False),
        ("<reasoning>a</reasoning><answer>4", False),
        ("<answer>4</answer><reasoning>a</reasoning>", False),
        ("<reasoning>a<answer>4</answer></reasoning>", False),
        ("<reasoning></reasoning><answer>4</answer>", False),
        ("<reasoning>a</reasoning><answer> \n</answer>", False),
        ("</reasoning>a<reasoning><answer>4</answer>", False),
        ("4", False),
        ("", False),
    ],
)
def test_format_is_exact_when_each_tag_is_there_once_in_order_around_something(completion, exact):
    assert format_is_exact(completion, TAGS) is exact


@given(st.text(alphabet="ab{}\\ ", max_size=12), st.text(alphabet="xy} ", max_size=6))
def test_a_box_holds_a_text_with_balanced_braces(content, tail):
    depth = 0
    for position, character in enumerate(content):
        escaped = position > 0 and content[position - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            break
    found = last_boxed(f"\\boxed{{{content}}}{tail}")
    if depth == 0 and not content.endswith("\\"):
        assert found == content


@given(st.lists(st.sampled_from([*TAGS.all, "42", " ", "\\boxed{7}", "#### 8", "\n", "{", "}"]), max_size=12))
def test_any_text_has_an_answer_or_none(pieces):
    completion = "".join(pieces)
    answer = extract_answer(completion, TAGS)
    assert answer is None or answer in completion
    if format_is_exact(completion, TAGS):
        assert answer is not None
