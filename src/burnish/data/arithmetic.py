"""A built-in data set: grade-school word problems in English, made from a seed, with worked solutions.

A problem is a shape (a sequence of one to three operations with its wordings) filled with small numbers,
names and objects. Training and test problems are disjoint by construction: a hash of the shape and its
numbers decides the split, so no test problem has been seen with other names either. The language is a small
closed set of words so that a model of half a million parameters can learn it in minutes; it says nothing
about how a real model reasons.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from burnish.data.types import Example

Split = Literal["train", "test"]
Tags = tuple[str, str, str, str]
TAGS: Tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
"""Where reasoning starts and ends, and where the answer starts and ends."""

MAX_NUMBER = 50
"""Every number in a problem and every intermediate result lies in 1..MAX_NUMBER."""

NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo"),
    *("Iris", "Jon", "Kim", "Leo", "Mia", "Noor", "Omar", "Pia"),
)
OBJECTS = (
    *("apples", "beads", "books", "buttons", "cards", "coins", "cookies", "eggs"),
    *("flowers", "marbles", "pears", "pens", "shells", "stamps", "stones", "tickets"),
)
CONTAINERS = ("bags", "baskets", "boxes", "jars")

_TERM = range(2, 31)  # what is added and taken away
_FACTOR = range(2, 10)
_PARTS = range(2, 7)  # into how many parts something is shared
_WHOLE = range(4, MAX_NUMBER + 1)

Mistake = Literal["stops early", "wrong operation", "no tags"]


@dataclass(frozen=True)
class Shape:
    """One kind of problem. `steps` are (left, operator, right) over the operand names a, b, c, d and the
    results r1, r2 of earlier steps; the last step gives the answer. `mistake` is what a careless pupil does
    with problems of this kind, and `mistake_rate` how often (see `demonstrations`)."""

    name: str
    wordings: tuple[str, ...]
    operands: tuple[range, ...]
    steps: tuple[tuple[str, str, str], ...]
    mistake: Mistake
    mistake_rate: float


SHAPES = (
    Shape(
        "gain",
        (
            "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?",
            "There are {a} {things} on a table. {name} puts {b} more there. How many {things} are on the table now?",
        ),
        (_TERM, _TERM),
        (("a", "+", "b"),),
        "no tags",
        0.6,
    ),
    Shape(
        "loss",
        (
            "{name} has {a} {things} and gives {b} of them to {other}. How many {things} does {name} have left?",
            "There are {a} {things} on a table. {name} takes {b} of them. How many {things} are left?",
        ),
        (_TERM, _TERM),
        (("a", "-", "b"),),
        "wrong operation",
        0.25,
    ),
    Shape(
        "packs",
        (
            "{name} has {a} {packs} with {b} {things} in each. How many {things} does {name} have in all?",
            "There are {b} {things} in each of {a} {packs}. How many {things} are there in all?",
        ),
        (_FACTOR, _FACTOR),
        (("a", "*", "b"),),
        "wrong operation",
        0.62,
    ),
    Shape(
        "share",
        (
            "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
            "{name} puts {a} {things} equally into {b} {packs}. How many {things} are in each?",
        ),
        (_WHOLE, _PARTS),
        (("a", "/", "b"),),
        "no tags",
        0.25,
    ),
    Shape(
        "gain then loss",
        (
            "{name} has {a} {things}, finds {b} more and then loses {c}. How many {things} does {name} have left?",
            "{name} has {a} {things}. {other} gives {name} {b} more, and {name} sells {c}. "
            "How many {things} does {name} have now?",
        ),
        (_TERM, _TERM, _TERM),
        (("a", "+", "b"), ("r1", "-", "c")),
        "stops early",
        0.62,
    ),
    Shape(
        "loss then gain",
        (
            "{name} has {a} {things}, loses {b} and then finds {c} more. How many {things} does {name} have now?",
            "There are {a} {things} on a table. {name} takes {b} of them and {other} puts {c} more there. "
            "How many {things} are on the table now?",
        ),
        (_TERM, _TERM, _TERM),
        (("a", "-", "b"), ("r1", "+", "c")),
        "wrong operation",
        0.25,
    ),
    Shape(
        "packs and more",
        (
            "{name} has {a} {things} and buys {b} {packs} with {c} {things} in each. "
            "How many {things} does {name} have now?",
            "{name} finds {a} {things}. {other} gives {name} {b} {packs} with {c} {things} in each. "
            "How many {things} does {name} have in all?",
        ),
        (_TERM, _FACTOR, _FACTOR),
        (("b", "*", "c"), ("a", "+", "r1")),
        "stops early",
        0.62,
    ),
    Shape(
        "packs less some",
        (
            "{name} fills {a} {packs} with {b} {things} each and then sells {c} {things}. How many {things} are left?",
            "{name} has {a} {packs} with {b} {things} in each and gives {c} {things} to {other}. "
            "How many {things} does {name} have left?",
        ),
        (_FACTOR, _FACTOR, _TERM),
        (("a", "*", "b"), ("r1", "-", "c")),
        "no tags",
        0.62,
    ),
    Shape(
        "more than",
        (
            "{name} has {a} {things}. {other} has {b} more than {name}. How many {things} do they have together?",
            "{name} finds {a} {things} and {other} finds {b} more than {name}. How many {things} do they find in all?",
        ),
        (_TERM, _TERM),
        (("a", "+", "b"), ("a", "+", "r1")),
        "stops early",
        0.62,
    ),
    Shape(
        "fewer than",
        (
            "{name} has {a} {things}. {other} has {b} fewer than {name}. How many {things} do they have together?",
            "{name} finds {a} {things} and {other} finds {b} fewer than {name}. How many {things} do they find in all?",
        ),
        (_TERM, _TERM),
        (("a", "-", "b"), ("a", "+", "r1")),
        "stops early",
        0.25,
    ),
    Shape(
        "times as many",
        (
            "{name} has {a} {things}. {other} has {b} times as many. How many {things} do they have together?",
            "{name} finds {a} {things} and {other} finds {b} times as many. How many {things} do they find in all?",
        ),
        (_FACTOR, _PARTS),
        (("a", "*", "b"), ("a", "+", "r1")),
        "stops early",
        0.25,
    ),
    Shape(
        "loss then share",
        (
            "{name} has {a} {things}, loses {b} and shares the rest equally among {c} friends. "
            "How many {things} does each friend get?",
            "{name} takes {b} of {a} {things} and puts the rest equally into {c} {packs}. "
            "How many {things} are in each?",
        ),
        (_WHOLE, _TERM, _PARTS),
        (("a", "-", "b"), ("r1", "/", "c")),
        "no tags",
        0.25,
    ),
    Shape(
        "packs, loss, gain",
        (
            "{name} buys {a} {packs} with {b} {things} in each, gives {c} {things} to {other} and then "
            "finds {d} more. "
            "How many {things} does {name} have now?",
            "{name} fills {a} {packs} with {b} {things} each, sells {c} {things} and buys {d} more. "
            "How many {things} does {name} have in all?",
        ),
        (_FACTOR, _FACTOR, _TERM, _TERM),
        (("a", "*", "b"), ("r1", "-", "c"), ("r2", "+", "d")),
        "stops early",
        0.62,
    ),
    Shape(
        "gain, gain, loss",
        (
            "{name} has {a} {things}, finds {b} more, buys {c} more and then loses {d}. "
            "How many {things} does {name} have left?",
            "{name} has {a} {things}. {other} gives {name} {b} more, {name} buys {c} more and sells {d}. "
            "How many {things} does {name} have now?",
        ),
        (_TERM, _TERM, _TERM, _TERM),
        (("a", "+", "b"), ("r1", "+", "c"), ("r2", "-", "d")),
        "stops early",
        0.25,
    ),
)

_SHAPES_BY_NAME = {shape.name: shape for shape in SHAPES}
_OTHER_OPERATION = {"+": "-", "-": "+", "*": "+", "/": "-"}
_STEP_WORDS = ("First", "Then", "Then")


@dataclass(frozen=True)
class Problem(Example):
    """An Example that knows how it was made. `steps` are (left, operator, right, result)."""

    shape: str = ""
    steps: tuple[tuple[int, str, int, int], ...] = ()

    @property
    def gsm8k(self) -> dict[str, str]:
        """The problem as a row of GSM8K: the working, then the answer after `####`."""
        return {"question": self.question, "answer": f"{_working(self.steps)}\n#### {self.answer}"}


def generate(split: Split, n: int, seed: int) -> list[Problem]:
    """n problems of a split; the same (split, n, seed) always gives the same ones."""
    problems = _problems(split, random.Random(f"burnish arithmetic {split} {seed}"))
    return [next(problems) for _ in range(n)]


def split_of(shape: str, numbers: tuple[int, ...]) -> Split:
    """The split to which every problem of this shape with these numbers belongs: one eighth are test
    problems."""
    digest = hashlib.sha256(f"{shape}: {numbers}".encode()).digest()
    return "test" if digest[0] < 32 else "train"


def solution(
    problem: Problem,
    tags: Tags = TAGS,
) -> str:
    """The worked solution in the tagged format: reasoning start/end, answer start/end."""
    return _tagged(problem.steps, problem.answer, tags)


def demonstrations(
    split: Split,
    n: int,
    seed: int,
    *,
    careless: bool = False,
    tags: Tags = TAGS,
) -> list[Example]:
    """n problems with worked solutions. `careless` ones were written by a pupil who knows the arithmetic and
    is sloppy: with the shape's `mistake_rate` the solution stops before the last step, begins with the wrong
    operation, or leaves the tags out. A model taught from them is half-good in a way that rewards can
    mend."""
    rng = random.Random(f"burnish pupil {split} {seed}")
    return [_demonstrate(problem, careless, rng, tags) for problem in generate(split, n, seed)]


def _problems(split: Split, rng: random.Random) -> Iterator[Problem]:
    while True:
        shape = rng.choice(SHAPES)
        numbers = tuple(rng.choice(values) for values in shape.operands)
        while (steps := _work_out(shape, numbers)) is None or split_of(shape.name, numbers) != split:
            numbers = tuple(rng.choice(values) for values in shape.operands)
        name, other = rng.sample(NAMES, 2)
        question = rng.choice(shape.wordings).format(
            name=name,
            other=other,
            things=rng.choice(OBJECTS),
            packs=rng.choice(CONTAINERS),
            **dict(zip("abcd", numbers, strict=False)),
        )
        yield Problem(question=question, answer=str(steps[-1][3]), shape=shape.name, steps=steps)


def _work_out(shape: Shape, numbers: tuple[int, ...]) -> tuple[tuple[int, str, int, int], ...] | None:
    """The steps with their numbers, or None where a result is not a whole number in 1..MAX_NUMBER."""
    values: dict[str, int] = dict(zip("abcd", numbers, strict=False))
    steps = []
    for i, (left, operator, right) in enumerate(shape.steps, start=1):
        result = _apply(values[left], operator, values[right])
        if result is None:
            return None
        values[f"r{i}"] = result
        steps.append((values[left], operator, values[right], result))
    return tuple(steps)


def _apply(left: int, operator: str, right: int) -> int | None:
    if operator == "/":
        result, remainder = divmod(left, right)
        if remainder:
            return None
    else:
        result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return result if 1 <= result <= MAX_NUMBER else None


def _working(steps: tuple[tuple[int, str, int, int], ...]) -> str:
    sentences = (
        f"{word} {left} {operator} {right} = {result}."
        for word, (left, operator, right, result) in zip(_STEP_WORDS, steps, strict=False)
    )
    return " ".join(sentences)


def _tagged(steps: tuple[tuple[int, str, int, int], ...], answer: str, tags: Tags) -> str:
    return f"{tags[0]}{_working(steps)}{tags[1]}\n{tags[2]}{answer}{tags[3]}"


def _demonstrate(problem: Problem, careless: bool, rng: random.Random, tags: Tags) -> Example:
    shape = _SHAPES_BY_NAME[problem.shape]
    if not careless or rng.random() >= shape.mistake_rate:
        return Example(problem.question, solution(problem, tags))
    if shape.mistake == "no tags":
        return Example(problem.question, f"{_working(problem.steps)} The answer is {problem.answer}.")
    if shape.mistake == "stops early":
        steps = problem.steps[:-1]
        return Example(problem.question, _tagged(steps, str(steps[-1][3]), tags))
    left, operator, right, _ = problem.steps[0]
    operator = _OTHER_OPERATION[operator]
    result = _apply(left, operator, right)
    if result is None:  # the wrong operation leads outside the known numbers: the pupil notices
        return Example(problem.question, solution(problem, tags))
    steps = ((left, operator, right, result),)
    return Example(problem.question, _tagged(steps, str(result), tags))
