"""Whether an answer equals the gold answer.

Most answers are decided here in microseconds and exactly: as strings, or as plain numbers and fractions in
rational arithmetic. Only expressions are left to math-verify (`symbolic_equal`), which can take for ever
and therefore runs in a process that can be killed (see `pool`). Nothing is ever deleted from inside a word,
and an answer has to *be* the gold answer: prose or a list that merely contains it is wrong."""

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

MAX_ANSWER_CHARS = 1000  # a longer text is not an answer; it is never parsed


class Match(StrEnum):
    EXACT = "exact"  # the same string
    WHITE_SPACE = "white_space"  # the same string after white space is folded
    EQUAL = "equal"  # another way to write the same value
    WRONG = "wrong"
    UNDECIDED = "undecided"  # math-verify has to say


@dataclass(frozen=True)
class Number:
    """A plain number: value as written, and whether a percent sign followed (50 % is 50 or 1/2, as the gold
    asks)."""

    value: Fraction
    percent: bool

    @property
    def readings(self) -> set[Fraction]:
        return {self.value, self.value / 100} if self.percent else {self.value}

    @property
    def terminates(self) -> bool:
        """Whether the value has a finite decimal expansion."""
        denominator = self.value.denominator
        for prime in (2, 5):
            while denominator % prime == 0:
                denominator //= prime
        return denominator == 1


def compare(gold: str, answer: str) -> Match:
    """How `answer` matches `gold`, as far as that can be said without math-verify."""
    if not gold.strip() or not answer.strip():
        return Match.WRONG
    if answer == gold:
        return Match.EXACT
    if answer.split() == gold.split():
        return Match.WHITE_SPACE
    if len(answer) > MAX_ANSWER_CHARS:
        return Match.WRONG
    gold, answer = tidy(gold), tidy(answer)
    if not answer:
        return Match.WRONG
    if text_key(gold) == text_key(answer):
        return Match.EQUAL
    gold_number, number = read_number(gold), read_number(answer)
    if gold_number and number:
        if gold_number.readings & number.readings:
            return Match.EQUAL
        # 0.333333 for 1/3 is math-verify's to judge; two finite decimals are different, and that is all.
        return Match.WRONG if gold_number.terminates and number.terminates else Match.UNDECIDED
    if gold_number and (not re.search(r"[\d\\]", answer) or _SEVERAL_VALUES.search(answer)):
        return Match.WRONG
    if _is_prose(gold) or _is_prose(answer) or not _braces_balance(answer):
        return Match.WRONG
    return Match.UNDECIDED


def symbolic_equal(gold: str, answer: str) -> bool:
    """math-verify's judgement on two expressions. May take unbounded time and memory: call it in a worker."""
    from math_verify import parse, verify  # imports sympy, which only workers need

    # Boxed, the whole text is one expression; bare, math-verify would pick whichever number it likes from it.
    parsed = [parse(rf"\boxed{{{tidy(text)}}}", parsing_timeout=None, raise_on_error=False) for text in (gold, answer)]
    return bool(verify(*parsed, timeout_seconds=None, raise_on_error=False))


def is_near(gold: str, answer: str) -> bool:
    """Whether both are plain numbers and the answer lies within 10 % of the gold one (the tutorials'
    "partial")."""
    gold_number, number = read_number(tidy(gold)), read_number(tidy(answer))
    if gold_number is None or number is None:
        return False
    return any(abs(value - wanted) <= abs(wanted) / 10 for wanted in gold_number.readings for value in number.readings)


def vote_key(answer: str) -> str:
    """Answers with the same key are the same vote in maj@k: numbers by value, everything else by its text."""
    tidied = tidy(answer)
    number = read_number(tidied) if len(answer) <= MAX_ANSWER_CHARS else None
    return f"{number.value}{'%' if number.percent else ''}" if number else text_key(tidied)


# --- text --------------------------------------------------------------------------------------------------

_CHARACTERS = str.maketrans({"−": "-", "–": "-", "⁄": "/", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
_SETTING = (
    (re.compile(r"<<[^<>]*>>"), ""),  # GSM8K's calculator annotations
    (re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])"), ""),
    (re.compile(r"\\[,!;: ]|\\(?:quad|qquad)(?![A-Za-z])|(?<!\\)~"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))"), "°"),
    (re.compile(r"\\?\$|\\[()\[\]]|\*\*|`"), " "),  # delimiters of mathematics, and emphasis
)


def tidy(text: str) -> str:
    """The text without what only sets it: mathematics delimiters, spacing and font commands, a final full
    stop."""
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _SETTING:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def text_key(tidied: str) -> str:
    """Two tidied texts with the same key are equal as strings: white space counts only between two letters or
    digits, letter case only in formulas (2X is not 2x, but Monday is monday and choice (A) is a)."""
    key = re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", tidied)
    if choice := re.fullmatch(r"\(?([A-Za-z])[).]?", key):
        return choice.group(1).upper()  # a choice: A, (A), a)
    return key.casefold() if re.search(r"[A-Za-z]{2,}", key) else key


_MATH_WORDS = frozenset({"sqrt", "frac", "sinh", "cosh", "tanh", "asin", "acos", "atan", "infinity", "infty"})
# What math-verify reads as the last of two values, or as their sum: `11 \to 12` would be 12, and `5 7` too.
_SEVERAL_VALUES = re.compile(r"\d\s+\d|\\\\|\\(?:to|in|ne|neq|equiv|rightarrow|Rightarrow|implies|iff)(?![A-Za-z])")


def _is_prose(tidied: str) -> bool:
    words = re.findall(r"(?<![\\A-Za-z{])[A-Za-z]{4,}", tidied)
    return any(word.lower() not in _MATH_WORDS for word in words)


def _braces_balance(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


# --- plain numbers ---------------------------------------------------------------------------------------

_INT = r"\d{1,18}"
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d{1,300})(?:\.\d{0,300})?(?:[eE][+-]?\d{1,3})?|\.\d{1,300}"
_PLAIN = re.compile(
    rf"""
    (?P<sign>[-+])?\s*[€£¥₹]?\s*
    (?: (?P<whole>{_INT}) (?: \s+(?P<mixed_top>{_INT})/(?P<mixed_bottom>{_INT})
                            | \s*\\frac\{{(?P<mixed_top2>{_INT})\}}\{{(?P<mixed_bottom2>{_INT})\}} )
      | \\frac\s*\{{\s*(?P<top>[-+]?(?:{_DECIMAL}))\s*\}}\s*\{{\s*(?P<bottom>{_DECIMAL})\s*\}}
      | (?P<number>{_DECIMAL}) (?:\s*/\s*(?P<over>{_DECIMAL}))?
    )
    (?P<rest>(?![\d,.]).*)?
    """,
    re.VERBOSE | re.DOTALL,
)
_LEAD = re.compile(
    r"(?:(?:so|thus|therefore|hence),?\s+)?(?:the\s+)?(?:final\s+)?(?:answer|result|total)(?:\s+is)?"
    r"\s*[:=]?\s*(?=\S)",
    re.IGNORECASE,
)
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_UNIT = re.compile(r"[mck]m|[km]?g|m?l|m|s|h|hrs?|min|sec|mph|kph|ft|lbs?|oz|kw|usd|eur|gbp|st|nd|rd|th", re.IGNORECASE)
# Words that say something else about the number than its unit.
_NO_UNIT = re.compile(
    r"and|or|to|of|if|when|not|without|less|more|than|remainder|mod|plus|minus|times|over|divided|by"
    r"|squared|cubed|sqrt|sin|cos|tan|log|ln|exp|pi|half|halves|thirds?|quarters?|fourths?|fifths?"
    r"|one|two|three|four|five|six|seven|eight|nine|ten",
    re.IGNORECASE,
)


def read_number(tidied: str) -> Number | None:
    """The plain number that a tidied text is, with its unit or the words "the answer is" around it; None
    where the text is anything else (an expression, a list, several numbers). `2 + 3 = 5` is 5, and so is
    `x = 5`."""
    if len(tidied) > MAX_ANSWER_CHARS:
        return None
    lead = _LEAD.match(tidied)
    match = _PLAIN.fullmatch(_right_side(tidied[lead.end() :] if lead else tidied))
    if match is None:
        return None
    groups = match.groupdict()
    scale = _scale_and_percent(groups["rest"] or "")
    if scale is None:
        return None
    try:
        value = _value(groups)
    except ZeroDivisionError:
        return None
    factor, percent = scale
    return Number(value=value * factor * (-1 if groups["sign"] == "-" else 1), percent=percent)


def _value(groups: dict[str, str | None]) -> Fraction:
    """The unsigned value of a match of _PLAIN. Raises ZeroDivisionError for 1/0."""
    whole, top, over = groups["whole"], groups["top"], groups["over"]
    if whole is not None:
        mixed_top = groups["mixed_top"] or groups["mixed_top2"] or ""
        mixed_bottom = groups["mixed_bottom"] or groups["mixed_bottom2"] or ""
        return int(whole) + Fraction(int(mixed_top), int(mixed_bottom))
    if top is not None:
        return _fraction(top) / _fraction(groups["bottom"] or "")
    return _fraction(groups["number"] or "") / (_fraction(over) if over else 1)


def _fraction(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", ""))


def _right_side(text: str) -> str:
    """What follows the last `=` of `x = 5` or of a computation; the text itself where the left side is
    neither."""
    left, equals, right = text.rpartition("=")
    if not equals:
        return text
    arithmetic = re.sub(r"(\d),(?=\d{3})", r"\1", re.sub(r"\\(?:times|cdot|div|frac)(?![A-Za-z])", "*", left))
    if re.fullmatch(r"\s*[A-Za-z]\s*|[\d\s.+\-*/×÷(){}=%€£]+", arithmetic):
        return right.strip()
    return text


def _scale_and_percent(rest: str) -> tuple[int, bool] | None:
    """(factor, percent) of what follows a number; None where that is not a unit, so that the text is no
    number."""
    attached = bool(rest) and not rest[0].isspace()
    rest = rest.strip()
    percent = re.match(r"%|percent(?![A-Za-z])", rest, re.IGNORECASE)
    if percent:
        rest, attached = rest[percent.end() :].strip(), False
    if rest.startswith("°"):
        rest, attached = rest[1:].strip(), False
        if rest in ("C", "F"):
            rest = ""
    if not rest:
        return 1, percent is not None
    if not re.fullmatch(r"[A-Za-z][A-Za-z\s'’./-]*(?:\^?[23])?|[A-Za-z]+\s?\^\{[23]\}", rest):
        return None
    words = re.findall(r"[A-Za-z]+", rest)
    is_unit = _UNIT.fullmatch(words[0]) is not None and not (attached and len(words[0]) == 1)
    if not is_unit and (attached or len(words[0]) == 1 or (len(words[0]) == 2 and len(words) == 1)):
        return None  # variables: 5xy, 5m, 5 x, 5 xy
    if any(_NO_UNIT.fullmatch(word) for word in words):
        return None
    return _SCALES.get(words[0].lower().removesuffix("s"), 1), percent is not None
