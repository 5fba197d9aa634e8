"""When an answer equals the gold one."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.rewards.check import Match, compare, is_near, read_number, symbolic_equal, tidy, vote_key

RIGHT = (Match.EXACT, Match.WHITE_SPACE, Match.EQUAL)


def is_right(gold: str, answer: str) -> bool:
    match = compare(gold, answer)
    return symbolic_equal(gold, answer) if match is Match.UNDECIDED else match in RIGHT


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1234", "$1,234.00"),
        ("0.5", "1/2"),
        ("1/2", "0.5"),
        ("1/2", "\\frac12"),
        ("7.75", "7 3/4"),
        ("7.75", "$7\\frac{3}{4}$"),
        ("-5", "-$5"),
        ("-5", "−5"),
        ("50", "50%"),
        ("0.5", "50 percent"),
        ("50%", "0.5"),
        ("12", "12 apples"),
        ("12", "The answer is 12."),
        ("18", "$18 every day at the farmers' market"),
        ("18", "9 * 2 = 18"),
        ("18", "$9*2=<<9*2=18>>18"),
        ("5", "x = 5"),
        ("5", "5 cm"),
        ("25", "25 cm^2"),
        ("90", "90^\\circ"),
        ("2000000", "2 million"),
        ("1500", "1.5 \\times 10^3"),
        ("100", "1e2"),
        ("Monday", " monday"),
        ("C", "(C)"),
        ("x^2+1", "1 + x^2"),
        ("\\frac{1}{3}", "0.333333"),
        ("\\{1,2\\}", "2, 1"),
        ("(1,2)", "( 1, 2 )"),
        ("\\sqrt{2}", "\\text{$\\sqrt2$}"),
    ],
)
def test_another_way_to_write_the_gold_answer_is_right(gold, answer):
    assert is_right(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("3", "-3"),
        ("9", "8.5"),
        ("42", ""),
        ("42", "$ $"),
        ("", "42"),
        ("12", "13 apples"),
        ("12", "12 or 13"),
        ("12", "12, 13"),
        ("12", "12 of 13"),
        ("12", "12 and then 13"),
        ("13", "12 \\\\ 13"),
        ("12", "11 \\to 12"),
        ("6", "1 5"),
        ("15", "1 2 3 4 5"),
        ("12", "not 12"),
        ("12", "12} \\boxed{12"),
        ("12", "13} or \\boxed{12"),
        ("1213", "12,13"),
        ("5", "5x"),
        ("5", "5 xy"),
        ("5", "5 or six"),
        ("5", "5 million"),
        ("1200", "1,200,000"),
        ("1/3", "0.33"),
        ("1", "1/0"),
        ("Monday", "dayMon"),
        ("Monday", "Tuesday"),
        ("a day", "day"),
        ("A", "B"),
        ("(1,2)", "(2,1)"),
        ("42", "42 " * 1000),
        ("5", "1.2.3"),
    ],
)
def test_anything_else_is_wrong(gold, answer):
    assert not is_right(gold, answer)


def test_the_kind_of_match_tells_the_gold_string_from_white_space_and_from_equal_value():
    assert compare("42", "42") is Match.EXACT
    assert compare("42", " 42\n") is Match.WHITE_SPACE
    assert compare("4 2", "42") is not Match.WHITE_SPACE
    assert compare("42", "42.0") is Match.EQUAL


def test_nothing_is_deleted_inside_words():
    for word in ("dollars", "seconds", "a banana", "Monday", "points", "an ant"):
        assert tidy(word) == word
    assert tidy("\\leftarrow") == "\\leftarrow"


numbers = st.fractions(max_denominator=1000) | st.integers().map(Fraction)


@given(numbers, numbers)
def test_plain_fractions_are_compared_exactly(gold, answer):
    gold_text, text = str(gold), str(answer)
    assert compare(gold_text, gold_text) is Match.EXACT
    if gold != answer:
        assert compare(gold_text, text) in (Match.WRONG, Match.UNDECIDED)


@given(st.integers(-(10**15), 10**15), st.integers(0, 6))
def test_decimals_with_separators_and_units_read_as_their_value(digits, places):
    value = Fraction(digits, 10**places)
    sign, whole, rest = "-" if digits < 0 else "", abs(digits) // 10**places, abs(digits) % 10**places
    text = f"{sign}${whole:,}" + (f".{rest:0{places}d}" if places else "") + " dollars"
    number = read_number(tidy(text))
    assert number is not None
    assert number.value == value


@given(st.text(max_size=40), st.sampled_from(["42", "1/2", "x+1", "Monday", ""]))
def test_any_text_can_be_compared(answer, gold):
    match = compare(gold, answer)
    assert (match is Match.WRONG) or answer.strip()
    assert isinstance(vote_key(answer), str)
    is_near(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer", "near"),
    [
        ("100", "110", True),
        ("100", "90.0", True),
        ("100", "110.1", False),
        ("-10", "-10.5", True),
        ("10", "-10", False),
        ("0", "0.01", False),
        ("0", "0", True),
        ("x", "x", False),
        ("0.5", "52%", True),
    ],
)
def test_near_is_within_ten_percent_of_the_gold_number(gold, answer, near):
    assert is_near(gold, answer) is near


def test_equal_values_are_one_vote():
    assert vote_key("1,234.00") == vote_key("$1234")
    assert vote_key("1/2") == vote_key("0.5")
    assert vote_key("Monday ") == vote_key("monday")
    assert vote_key("x+1") != vote_key("x+2")
