"""The reward stack: weights, statuses, the gate, and a user's own functions."""

import math
import re
import textwrap
import time
from pathlib import Path

import pytest

from burnish.rewards.stack import RewardOptions, RewardStack
from burnish.rewards.types import RewardError, RewardItem, Score, ScoreStatus

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "rewards.md"


def item(completion: str, answer: str = "42") -> RewardItem:
    return RewardItem(prompt="What is six times seven?", completion=completion, question="6*7?", answer=answer)


def formatted(answer: str, reasoning: str = "six sevens") -> str:
    return f"<reasoning>{reasoning}</reasoning>\n<answer>{answer}</answer>"


def score_all(options: RewardOptions, *completions: str) -> list[Score]:
    with RewardStack(options) as stack:
        return stack.score([item(completion) for completion in completions])


WEIGHTS = RewardOptions(
    reward_exact_answer=2.0,
    reward_white_space_format_match=1.5,
    reward_exact_format_match=0.5,
    reward_partial_format_match=0.25,
    penalty_incorrect_format=-0.125,
    penalty_incorrect_answer=-1.0,
)


@pytest.mark.parametrize(
    ("completion", "answer", "exact_format", "partial_format"),
    [
        (formatted("42"), 2.0, 0.5, 1.0),
        (formatted(" 42 "), 1.5, 0.5, 1.0),
        (formatted("42.0"), 2.0, 0.5, 1.0),
        (formatted("6 \\cdot 7"), 2.0, 0.5, 1.0),
        (formatted("41"), -1.0, 0.5, 1.0),
        ("42", -1.0, 0.0, -0.5),
        ("<answer>42</answer>", 2.0, 0.0, 0.25),
        ("<answer>42</answer><answer>42</answer>", 2.0, 0.0, -0.5),
        ("", -1.0, 0.0, -0.5),
    ],
)
def test_parts_are_the_options_weights_and_the_total_is_their_sum(completion, answer, exact_format, partial_format):
    (score,) = score_all(WEIGHTS, completion)
    assert score.parts == {"answer": answer, "exact_format": exact_format, "partial_format": partial_format}
    assert score.total == pytest.approx(answer + exact_format + partial_format)
    assert score.status is ScoreStatus.SCORED
    assert score.correct is (answer > 0)


def test_with_default_weights_a_right_formatted_answer_is_worth_one_point_one():
    right, wrong, bare = score_all(RewardOptions(), formatted("42"), formatted("7"), "<answer>42</answer>")
    assert [right.total, wrong.total, bare.total] == pytest.approx([1.1, 0.1, 1.0])
    assert (right.format_ok, wrong.format_ok, bare.format_ok) == (True, True, False)
    assert (right.extracted, wrong.extracted) == ("42", "7")


def test_gated_format_counts_only_where_the_answer_is_right():
    options = RewardOptions(reward_gate_on_correctness=True, penalty_incorrect_format=-0.5)
    right, wrong, junk = score_all(options, formatted("42"), formatted("7"), "junk")
    assert right.total == pytest.approx(1.1)
    assert [wrong.total, junk.total] == [0, 0]


def test_partly_correct_is_within_ten_percent_and_implied_by_correct():
    scores = score_all(RewardOptions(), *(formatted(text) for text in ("42", "40", "30", "6*7", "\\sqrt{2}")))
    assert [score.partially_correct for score in scores] == [True, True, False, True, False]
    assert [score.correct for score in scores] == [True, False, False, True, False]


def test_the_answer_in_the_reasoning_does_not_count_beside_an_answer_tag():
    (score,) = score_all(RewardOptions(), formatted("41", reasoning="it is \\boxed{42} #### 42"))
    assert not score.correct


def test_an_endless_answer_scores_nothing_and_says_timed_out():
    options = RewardOptions(math_verify_timeout=1.0, max_failed_scores_fraction=0.0)
    before = time.monotonic()
    endless, right = score_all(options, formatted("10^(10^10)"), formatted("42"))
    assert time.monotonic() - before < 10
    assert (endless.total, endless.status, endless.correct) == (0, ScoreStatus.TIMED_OUT, False)
    assert set(endless.parts.values()) == {0}
    assert right.total == pytest.approx(1.1)


def test_an_answer_that_many_completions_share_is_checked_once():
    with RewardStack(RewardOptions(math_verify_timeout=1.0, math_verify_num_procs=1)) as stack:
        before = time.monotonic()
        scores = stack.score([item(formatted("10^(10^10)"))] * 8)
        assert time.monotonic() - before < 4
    assert {score.status for score in scores} == {ScoreStatus.TIMED_OUT}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty_incorrect_answer": 0.5}, "penalty_incorrect_answer=0.5 would be a reward"),
        ({"math_verify_timeout": 0}, "math_verify_timeout=0"),
        ({"math_verify_num_procs": 0}, "math_verify_num_procs=0"),
        ({"max_failed_scores_fraction": 1.5}, "max_failed_scores_fraction=1.5"),
        ({"reward_functions": ("f",)}, "go together"),
        ({"reward_functions_path": "x.py"}, "go together"),
        ({"reward_functions_path": "x.py", "reward_functions": ("f",)}, "x.py: there is no such file"),
        ({"solution_end_token": ""}, "solution_end_token"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, message):
    with pytest.raises(RewardError, match=re.escape(message)):
        RewardOptions(**options)


# --- a user's functions --------------------------------------------------------------------------------


@pytest.fixture
def user_options(tmp_path):
    def make(source: str, *names: str, **options: float) -> RewardOptions:
        path = tmp_path / "my_rewards.py"
        path.write_text(textwrap.dedent(source))
        return RewardOptions(
            **{"math_verify_timeout": 20.0, **options},
            reward_functions_path=str(path),
            reward_functions=names,
        )

    return make


def test_the_example_of_the_guide_works(user_options):
    source = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert source is not None
    options = user_options(source.group(1), "right_answer", "brevity", max_failed_scores_fraction=0.5)
    with RewardStack(options) as stack:
        right, wrong, unknown = stack.score(
            [item(formatted("42")), item(formatted("41")), item(formatted("42"), answer="")]
        )
    brevity = 0.2 * (1 - len(formatted("42")) / 400)
    assert right.parts == {"right_answer": 1.0, "brevity": pytest.approx(brevity)}
    assert right.total == pytest.approx(1.0 + brevity)
    assert wrong.parts["right_answer"] == 0.0
    assert (unknown.status, unknown.total) == (ScoreStatus.FAILED, 0.0)
    assert (right.correct, wrong.correct, right.format_ok) == (True, False, True)


def test_functions_get_four_lists_of_strings_in_order(user_options):
    source = """
        def reward(prompts, completions, answer, question):
            assert (prompts, answer, question) == (["What is six times seven?"] * 2, ["42"] * 2, ["6*7?"] * 2)
            return [float(text) for text in completions]
    """
    assert [score.total for score in score_all(user_options(source, "reward"), "3", "4")] == [3.0, 4.0]


def test_numpy_scores_are_numbers_too(user_options):
    source = """
        import numpy as np

        def reward(completions, **kwargs):
            return np.arange(len(completions), dtype=np.float32)
    """
    assert [score.total for score in score_all(user_options(source, "reward"), "a", "b")] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0]", "returned 1 scores for 2 completions"),
        ("[1.0, float('nan')]", "returned nan as score 1"),
        ("[float('inf'), 0.0]", "returned inf as score 0"),
        ("['1', 2]", "returned '1' (str) as score 0"),
        ("[[1], 2]", "returned [1] (list) as score 0"),
        ("None", "returned None (NoneType)"),
        ("1.0", "returned 1.0 (float)"),
        ("'ab'", "returned 'ab' (str)"),
        ("{1.0, 2.0}", "returned {1.0, 2.0} (set)"),
        ("[0.0, -1e308]", "returned -1e+308 as score 1; it has to lie between -1e+06 and 1e+06"),
    ],
)
def test_what_is_no_list_of_finite_numbers_is_an_error_that_names_function_and_file(user_options, returned, message):
    options = user_options(f"def reward(**kwargs):\n    return {returned}", "reward")
    with pytest.raises(RewardError, match=re.escape(message)) as caught:
        score_all(options, "a", "b")
    assert "reward function 'reward' in" in str(caught.value)
    assert "my_rewards.py" in str(caught.value)


RAISES = """
    def reward(completions, **kwargs):
        raise KeyError("no such thing")
"""


def test_an_exception_in_a_users_function_ends_the_run_with_its_traceback(user_options):
    with pytest.raises(RewardError, match="no such thing") as caught:
        score_all(user_options(RAISES, "reward"), "a", "b")
    message = str(caught.value)
    assert "reward function 'reward' in" in message
    assert "my_rewards.py" in message
    assert "Traceback" in message
    assert "max_failed_scores_fraction=0.5" in message


def test_an_exception_is_counted_apart_from_wrong_where_failures_are_allowed(user_options):
    options = user_options(RAISES, "reward", max_failed_scores_fraction=1.0)
    for score in score_all(options, formatted("42"), formatted("41")):
        assert (score.status, score.total, score.parts) == (ScoreStatus.FAILED, 0.0, {"reward": 0.0})


def test_none_from_a_function_fails_that_item_until_there_are_too_many(user_options):
    source = """
        def reward(completions, **kwargs):
            return [None if text == "?" else 1.0 for text in completions]
    """
    options = user_options(source, "reward")
    statuses = [score.status for score in score_all(options, "?", "a", "b")]
    assert statuses == [ScoreStatus.FAILED, ScoreStatus.SCORED, ScoreStatus.SCORED]
    with pytest.raises(RewardError, match="2 of 3 completions could not be scored"):
        score_all(options, "?", "?", "b")


@pytest.mark.parametrize("change", ["pop()", "clear()", "append('x')"])
def test_a_function_that_changes_its_lists_still_owes_one_score_per_completion(user_options, change):
    source = f"""
        def reward(completions, **kwargs):
            completions.{change}
            return [1.0] * len(completions)
    """
    with pytest.raises(RewardError, match=r"returned \d scores for 2 completions"):
        score_all(user_options(source, "reward"), "a", "b")


def test_every_function_gets_lists_of_its_own(user_options):
    source = """
        def first(completions, **kwargs):
            completions.clear()
            return [1.0, 1.0]

        def second(completions, **kwargs):
            return [float(text) for text in completions]
    """
    assert [score.total for score in score_all(user_options(source, "first", "second"), "3", "4")] == [4.0, 5.0]


def test_a_name_given_twice_is_refused(user_options):
    with pytest.raises(RewardError, match="reward_functions names 'reward' twice"):
        user_options("def reward(**kwargs): ...", "reward", "reward")


def test_the_traceback_of_a_users_function_begins_in_its_file(user_options):
    with pytest.raises(RewardError) as caught:
        score_all(user_options(RAISES, "reward"), "a")
    assert "burnish" not in str(caught.value).partition("Traceback")[2]
    assert "in reward" in str(caught.value)
    with pytest.raises(RewardError, match="cannot be imported") as caught, RewardStack(user_options("1 +", "reward")):
        pytest.fail("entered with a file that cannot be imported")
    assert "importlib" not in str(caught.value)
    assert "line 1" in str(caught.value)


def test_a_function_that_exits_is_named(user_options):
    with pytest.raises(RewardError, match=r"(?s)reward function 'reward' in .*SystemExit: 3"):
        score_all(user_options("import sys\ndef reward(**kwargs):\n    sys.exit(3)", "reward"), "a")


def test_a_hanging_function_is_stopped_and_named(user_options):
    source = """
        import time

        def reward(completions, **kwargs):
            time.sleep(1000)
    """
    before = time.monotonic()
    with pytest.raises(RewardError, match="not done within 1 seconds") as caught:
        score_all(user_options(source, "reward", math_verify_timeout=1.0), "a")
    assert time.monotonic() - before < 10
    assert "math_verify_timeout" in str(caught.value)


def test_a_file_keeps_its_state_between_calls_and_may_import_its_neighbours(user_options, tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("STEP = 0.5")
    source = """
        from helper_of_mine import STEP
        count = 0.0

        def reward(completions, **kwargs):
            global count
            count += STEP
            return [count] * len(completions)
    """
    with RewardStack(user_options(source, "reward")) as stack:
        assert [stack.score([item("a")])[0].total for _ in range(3)] == [0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(**kwargs): ...", "has no function 'reward'; it has other"),
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
        ("def reward(completions): ...", "keyword arguments prompts, completions, answer, question"),
        ("reward = 3", "has no function 'reward'"),
        ("import sys\nsys.exit(0)", "my_rewards.py cannot be imported: SystemExit: 0"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_before_anything_is_scored(user_options, source, message):
    with pytest.raises(RewardError, match=re.escape(message)), RewardStack(user_options(source, "reward")):
        pytest.fail("entered with a file that does not fit")


def test_gating_a_users_functions_is_refused(user_options):
    with pytest.raises(RewardError, match="reward_gate_on_correctness"):
        user_options("def reward(**kwargs): ...", "reward", reward_gate_on_correctness=True)


def test_no_total_is_ever_nan():
    for score in score_all(WEIGHTS, "", "<answer>", "\\boxed{", "#### ", formatted("\x00"), formatted("\\frac{"), "🙂"):
        assert math.isfinite(score.total)
