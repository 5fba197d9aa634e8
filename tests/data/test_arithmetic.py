"""The built-in problems: the same for a seed, right, disjoint between splits, and short."""

import re

import pytest

from burnish.data import arithmetic


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_same_seed_gives_the_same_problems_and_another_seed_others(split):
    first = arithmetic.generate(split, 200, seed=1)
    assert first == arithmetic.generate(split, 200, seed=1)
    assert first[:50] == arithmetic.generate(split, 50, seed=1)
    assert first != arithmetic.generate(split, 200, seed=2)


def test_no_shape_with_the_same_numbers_is_in_both_splits():
    # The steps of a problem hold all of its numbers.
    train, test = ({(p.shape, p.steps) for p in arithmetic.generate(s, 5000, 0)} for s in ("train", "test"))
    assert not train & test


def test_no_question_is_in_both_splits():
    train, test = ({p.question for p in arithmetic.generate(s, 3000, 0)} for s in ("train", "test"))
    assert not train & test


@pytest.mark.parametrize("shape", arithmetic.SHAPES, ids=lambda s: s.name)
def test_every_step_and_answer_is_right_and_small(shape):
    problems = [p for p in arithmetic.generate("train", 2000, 3) if p.shape == shape.name]
    assert problems
    for problem in problems:
        assert 1 <= len(problem.steps) <= 3
        for left, operator, right, result in problem.steps:
            assert eval(f"{left} {operator} {right}") == result
            assert all(1 <= n <= arithmetic.MAX_NUMBER for n in (left, right, result))
        assert problem.answer == str(problem.steps[-1][3])
        numbers = {int(n) for n in re.findall(r"\d+", problem.question)}
        results = {step[3] for step in problem.steps}
        used = {n for step in problem.steps for n in (step[0], step[2])}
        assert used <= numbers | results
        assert numbers <= used


def test_a_problem_has_the_shape_of_gsm8k():
    row = arithmetic.generate("train", 1, 0)[0].gsm8k
    assert set(row) == {"question", "answer"}
    working, _, answer = row["answer"].rpartition("\n#### ")
    assert working.endswith(f"= {answer}.")


def test_a_solution_is_in_the_tagged_format_and_ends_with_the_answer():
    for problem in arithmetic.generate("test", 100, 0):
        match = re.fullmatch(r"<reasoning>(.+)</reasoning>\n<answer>(\d+)</answer>", arithmetic.solution(problem))
        assert match is not None
        assert match[2] == problem.answer


def test_demonstrations_are_right_unless_a_careless_pupil_wrote_them():
    n = 4000
    problems = arithmetic.generate("train", n, 0)
    right = arithmetic.demonstrations("train", n, 0)
    assert [d.answer for d in right] == [arithmetic.solution(p) for p in problems]

    careless = arithmetic.demonstrations("train", n, 0, careless=True)
    assert [d.question for d in careless] == [p.question for p in problems]
    rates = {shape.name: shape.mistake_rate for shape in arithmetic.SHAPES}
    for name, rate in rates.items():
        rows = [i for i, p in enumerate(problems) if p.shape == name]
        wrong = sum(careless[i].answer != right[i].answer for i in rows) / len(rows)
        # A wrong operation that leaves the known numbers is noticed, so the rate may be lower; never higher.
        assert wrong < rate + 4 * (0.25 / len(rows)) ** 0.5
        assert wrong > 0.3 * rate
