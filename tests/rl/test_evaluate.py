"""`evaluate`: every prompt and every completion counts, the modes are their definitions, and training measures the
same thing."""

import json
import re
from collections import Counter
from itertools import combinations

import pytest
from tiny_runs import OPTIONS

from burnish.config.overrides import load_config
from burnish.config.schema import EvalConfig
from burnish.rl import evaluate_command
from burnish.rl.evaluate_command import evaluate

K = 4
EMBEDDED = (
    "load_parameters_path=builtin",
    "dataset_name=builtin",
    "max_prefill_predict_length=72",
    "max_target_length=128",
    "num_test_batches=3",
    "eval_batch_size=8",
    f"num_eval_passes={K}",
    "eval_sampling_strategy=liberal",
)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def run_evaluate(*args):
    return evaluate(load_config(EvalConfig, list(args)))


@pytest.fixture(scope="module")
def judged():
    """What the embedded model says to 24 built-in problems, K times each: (answer or None, right), judged here."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        prompts = evaluate_command.evaluate_prompts
        patch.setattr(evaluate_command, "evaluate_prompts", lambda *a, **k: seen.append(prompts(*a, **k)) or seen[-1])
        run_evaluate(*EMBEDDED)
    found = []
    for group in seen[0].groups:
        answers = [ANSWER.findall(completion.text) for completion in group.completions]
        values = [answer[-1].strip() if answer else None for answer in answers]
        found.append([(value, value == group.prompt.answer) for value in values])
    assert 0 < sum(right for group in found for _, right in group) < 24 * K
    return found


def any_is_right(group):
    return any(right for _, right in group)


def majority_is_right(group):
    votes = Counter(value for value, _ in group if value)
    return bool(votes) and dict(group)[max(votes, key=votes.__getitem__)]


@pytest.mark.parametrize(
    ("mode", "solved"),
    [
        ("pass", lambda groups: [any_is_right(group) for group in groups]),
        ("maj", lambda groups: [majority_is_right(group) for group in groups]),
        ("pass_at_1", lambda groups: [right for group in groups for _, right in group]),
    ],
    ids=["pass", "maj", "pass_at_1"],
)
def test_the_modes_are_their_definitions(judged, capsys, mode, solved):
    figures = run_evaluate(*EMBEDDED, f"eval_mode={mode}")
    expected = solved(judged)
    assert (figures["corr"], figures["total"]) == (sum(expected), len(expected))
    assert figures["accuracy"] == pytest.approx(sum(expected) / len(expected))
    printed = capsys.readouterr().out
    assert f"Evaluation ({mode}, K={K}): corr={sum(expected)}, total={len(expected)}, accuracy=" in printed
    subsets = [[any(r for _, r in pair) for pair in combinations(group, 2)] for group in judged]
    pass_at_2 = sum(sum(pairs) / len(pairs) for pairs in subsets) / len(subsets)
    assert f"pass@2={100 * pass_at_2:.2f}%" in printed


@pytest.fixture
def small(questions):
    """The options that training and evaluation have in common, of the tiny runs."""
    common = [option for option in OPTIONS if option.partition("=")[0] in EvalConfig.model_fields]
    return [*common, f"hf_eval_files={questions}", "num_test_batches=2", "eval_batch_size=2"]


def test_training_measures_what_evaluate_measures(whole_run, checkpoint, small):
    summary = json.loads((whole_run / "summary.json").read_text())
    trained = whole_run / "checkpoints" / "actor" / "6" / "model_params"
    for source, when in ((checkpoint, "before"), (trained, "after")):
        figures = run_evaluate(*small, f"load_parameters_path={source}")
        for name in ("accuracy", "format_accuracy", "mean_reward"):
            assert figures[name] == pytest.approx(summary[f"{name}_{when}"])


@pytest.mark.parametrize(("batches", "total"), [(-1, 6), (1, 4), (9, 6)])
def test_the_last_batch_counts_though_it_is_not_full(checkpoint, small, batches, total):
    figures = run_evaluate(
        *small, f"load_parameters_path={checkpoint}", "eval_batch_size=4", f"num_test_batches={batches}"
    )
    assert figures["total"] == total
