"""A training run as a whole: what it leaves behind, what stops it, and what must not change its result."""

import json
import re
import shutil
from collections import Counter

import jax
import numpy as np
import pytest
import tiny_rl
from conftest import TOKEN
from tiny_runs import metrics, run_training, saved, train_args

from burnish.checkpoints.export_command import to_huggingface
from burnish.checkpoints.hf_import import load_params
from burnish.checkpoints.store import TrainingStore, load_model_params
from burnish.config.overrides import load_config
from burnish.config.schema import DemoConfig, ExportConfig, RunConfig
from burnish.data.tokenizer import load_tokenizer
from burnish.errors import BurnishError
from burnish.observe.metrics import METRICS, REWARD_PART, read_metrics
from burnish.observe.rollouts import read_rollouts
from burnish.rewards.types import RewardError
from burnish.rl import demo as demo_module
from burnish.rl import setup
from burnish.rollout.engine import BuiltinEngine

TEMPERATURE = 0.9  # decode_sampling_temperature's default


def steps(run):
    return TrainingStore(run / "checkpoints" / "actor", keep=1).steps()


def export(checkpoint, directory):
    return to_huggingface(
        load_config(ExportConfig, [f"load_parameters_path={checkpoint}", f"base_output_directory={directory}"])
    )


# ---- what a run leaves behind ----


def test_every_metric_is_written_on_every_step(whole_run):
    written = [set(row) - {"step"} for row in read_metrics(whole_run / "metrics.jsonl")]
    parts = {f"{REWARD_PART}{name}" for name in ("answer", "exact_format", "partial_format")}
    elsewhere = {"kl", "seconds/reshard", "seconds/waiting"}  # a reference model, devices of its own for the sampler
    elsewhere |= {name for name in METRICS if name.startswith(("experts/", "off_policy/"))}
    expected = METRICS.keys() - {f"{REWARD_PART}<name>"} - elsewhere | parts
    assert written == [expected] * 6


def test_sampler_and_trainer_agree_on_every_step(whole_run):
    assert max(row["logprob_difference/max"] for row in metrics(whole_run)) < 1e-4


def test_the_loss_of_one_on_policy_update_is_zero_and_its_gradient_is_not(whole_run):
    """As the guide to metrics says: the advantages of a group sum to 0 and every ratio is 1."""
    for row in metrics(whole_run):
        assert row["loss"] == pytest.approx(0, abs=1e-6)
        assert row["grad_norm"] > 0.1


def test_the_learning_rate_follows_the_schedule_that_is_printed(whole_run, args):
    """Peak 0.01, no warm-up (a tenth of 6 updates is less than one), cosine to 0."""
    rates = [row["learning_rate"] for row in metrics(whole_run)]
    np.testing.assert_allclose(rates, [0.005 * (1 + np.cos(np.pi * n / 6)) for n in range(6)], rtol=1e-5)
    long = load_config(RunConfig, args("run", "num_batches=250", "rl.num_iterations=2"))
    assert setup.schedule(long).corner_points() == [
        (0, pytest.approx(0.01 / 51)),
        (50, pytest.approx(0.01)),
        (275, pytest.approx(0.005)),
        (500, pytest.approx(0, abs=1e-9)),
    ]


def test_advantages_in_the_records_are_those_of_the_rewards(whole_run):
    for step in range(1, 7):
        rows = read_rollouts(whole_run / "rollouts", step)
        rewards = np.array([row.reward for row in rows]).reshape(2, 4)
        expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
        np.testing.assert_allclose([row.advantage for row in rows], expected.ravel(), rtol=1e-12, atol=1e-12)
        assert all(sum(row.reward_parts.values()) == row.reward for row in rows)


def test_a_pass_asks_every_question_once(whole_run):
    asked = [Counter(row.prompt_index for step in part for row in read_rollouts(whole_run / "rollouts", step))
             for part in ((1, 2, 3), (4, 5, 6))]  # fmt: skip
    assert asked == [dict.fromkeys(range(6), 4)] * 2


def test_every_token_knows_the_weights_that_made_it(whole_run):
    for step in range(1, 7):
        for row in read_rollouts(whole_run / "rollouts", step):
            assert set(row.weight_versions) == {step - 1}


def test_the_summary_has_the_figures_before_and_after(whole_run):
    summary = json.loads((whole_run / "summary.json").read_text())
    figures = {
        f"{name}_{when}" for name in ("accuracy", "format_accuracy", "mean_reward") for when in ("before", "after")
    }
    assert summary.keys() == figures | {"steps", "seconds", "eval_prompts"}
    assert (summary["steps"], summary["eval_prompts"]) == (6, 4)
    assert summary["seconds"] > 0


def test_the_curve_is_a_picture(whole_run):
    assert (whole_run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_options_are_kept_as_a_recipe_for_the_same_run(whole_run, args):
    cfg = load_config(RunConfig, [str(whole_run / "config.yaml")])
    assert cfg == load_config(RunConfig, args("run", "num_test_batches=2", f"base_output_directory={whole_run.parent}"))


def test_the_token_is_written_nowhere(whole_run):
    """whole_run was trained with HF_TOKEN set."""
    files = [file for file in whole_run.rglob("*") if file.is_file()]
    assert len(files) > 20
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()]


def test_an_export_is_the_model_that_sampled(whole_run, tmp_path):
    """Step 4 was sampled with the weights of the checkpoint of step 3."""
    exported = export(whole_run / "checkpoints" / "actor" / "3" / "model_params", tmp_path / "exported")
    spec, params = load_params(exported)
    for row in read_rollouts(whole_run / "rollouts", 4):
        logprobs = tiny_rl.row_logprobs(params, row.prompt_ids, row.completion_ids, TEMPERATURE, spec)
        np.testing.assert_allclose(row.logprobs, logprobs, atol=1e-4)


def test_a_run_without_signal_exports_the_source_bit_for_bit(checkpoint, args, tmp_path):
    """Every reward is 0, so that every advantage and gradient is."""
    run_training(*args("run", "reward_partial_format_match=0", "num_batches=2"))
    assert {row["grad_norm"] for row in metrics(tmp_path / "run")} == {0.0}
    exported = export(tmp_path / "run" / "checkpoints" / "actor" / "2" / "model_params", tmp_path / "exported")
    for file in checkpoint.iterdir():
        assert (exported / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_run_goes_on_from_another_runs_checkpoint(whole_run, args, tmp_path):
    first = whole_run / "checkpoints" / "actor" / "6" / "model_params"
    run_training(*args("run", f"load_parameters_path={first}", "num_batches=1", "rl.grpo_beta=0.1"))
    assert metrics(tmp_path / "run")[0]["kl"] == pytest.approx(0, abs=1e-9)
    arrays, _ = saved(tmp_path / "run", 1)
    before, _ = saved(whole_run, 6)
    moved = [np.abs(arrays[n] - before[n]).max() for n in arrays if n.startswith("model_params")]
    assert 0 < max(moved) <= 0.0101  # one Adam step moves a weight by the learning rate at most


# ---- what must not change the result ----


@pytest.fixture(scope="module")
def two_steps(checkpoint, questions, tmp_path_factory):
    """two_steps(*changes): the directory of a run of two steps of four prompts. With Adam's usual eps, a gradient of
    almost 0 moves a weight by the whole learning rate in a direction that rounding decides."""

    def run(*changes):
        base = tmp_path_factory.mktemp("steps")
        options = ["batch_size=4", "num_batches=2", "adam_eps=0.01", *changes]
        run_training(*train_args(checkpoint, questions, base, "run", *options))
        return base / "run"

    return run


@pytest.fixture(scope="module")
def in_one_go(two_steps):
    return two_steps()


@pytest.mark.parametrize("change", ["train_micro_batch_size=1", "rollout_micro_batch_size=1", "max_num_seqs=3"])
def test_the_result_does_not_depend_on_micro_batches_and_slots(two_steps, in_one_go, change):
    run = two_steps(change)
    for step in (1, 2):
        ids, expected = ([row.completion_ids for row in read_rollouts(r / "rollouts", step)] for r in (run, in_one_go))
        assert ids == expected
    arrays, expected = (
        {name: a for name, a in saved(r, 2)[0].items() if name.startswith("model_params")} for r in (run, in_one_go)
    )
    for name, array in arrays.items():
        assert np.linalg.norm(array - expected[name]) < 1e-5 * np.linalg.norm(expected[name]), name


# ---- rewards ----

REWARDS = """\
def brevity(prompts, completions, answer, question, **kwargs):
    assert all(q in p for p, q in zip(prompts, question, strict=True)), "prompts are the rendered questions"
    assert len(completions) == len(answer)
    return [1 / (1 + len(text)) for text in completions]

def vowels(completions, **kwargs):
    return [sum(text.count(v) for v in "aeiou") for text in completions]

def broken(completions, **kwargs):
    raise KeyError("lost")

def not_a_number(completions, **kwargs):
    return [float("nan")] * len(completions)
"""


@pytest.fixture
def reward_file(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)
    return file


def test_a_users_reward_functions_are_what_is_trained_on(args, tmp_path, reward_file):
    run_training(
        *args("run", f"reward_functions_path={reward_file}", "reward_functions=brevity,vowels", "num_batches=2")
    )
    for row in read_rollouts(tmp_path / "run" / "rollouts", 1):
        brevity, vowels = 1 / (1 + len(row.completion)), sum(row.completion.count(v) for v in "aeiou")
        assert row.reward_parts == {"brevity": brevity, "vowels": vowels}
        assert row.reward == pytest.approx(brevity + vowels)
    written = metrics(tmp_path / "run")[0]
    assert {name for name in written if name.startswith(REWARD_PART)} == {"reward_parts/brevity", "reward_parts/vowels"}
    assert written["grad_norm"] > 0


@pytest.mark.parametrize(("function", "cause"), [("broken", "KeyError: 'lost'"), ("not_a_number", "nan")])
def test_a_reward_function_that_cannot_score_ends_the_run_by_name(args, tmp_path, reward_file, function, cause):
    with pytest.raises(RewardError, match=function) as error:
        run_training(*args("run", f"reward_functions_path={reward_file}", f"reward_functions={function}"))
    assert cause in str(error.value)
    assert str(reward_file) in str(error.value)
    assert steps(tmp_path / "run") == []


# ---- what is left out, and what stops a run ----


def test_truncated_completions_can_be_masked(args, tmp_path):
    """Their advantage is 0, and the others are compared among themselves."""
    run_training(*args("run", "rl.mask_truncated_completions=true", "num_batches=3", 'stop_strings=["7"]'))
    stopped = []
    for step in (1, 2, 3):
        rows = read_rollouts(tmp_path / "run" / "rollouts", step)
        for group in (rows[:4], rows[4:]):
            rewards = np.array([row.reward for row in group if row.stop_reason != "length"])
            stopped.append(len(rewards))
            expected = np.zeros(len(rewards))
            if len(rewards) > 1:
                expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            assert [row.advantage for row in group if row.stop_reason == "length"] == [0.0] * (4 - len(rewards))
            advantages = [row.advantage for row in group if row.stop_reason != "length"]
            np.testing.assert_allclose(advantages, expected, atol=1e-12)
    assert {2, 3} & set(stopped)  # groups with something left to compare and something masked
    assert all(np.isfinite(list(row.values())).all() for row in metrics(tmp_path / "run"))


def scaled(params):
    return jax.tree.map(lambda a: 1.5 * a, params)


def swapped(params):
    """Two leaves of one shape in each other's place."""
    layers = params["layers"]
    return {**params, "layers": {**layers, "gate_proj": layers["up_proj"], "up_proj": layers["gate_proj"]}}


@pytest.mark.parametrize("wrong", [scaled, swapped])
def test_a_sampler_with_other_weights_stops_the_run_before_anything_is_saved(args, tmp_path, monkeypatch, wrong):
    load_weights = BuiltinEngine.load_weights

    def wrong_from_the_third(engine, params, version):
        load_weights(engine, wrong(params) if version >= 2 else params, version)

    monkeypatch.setattr(BuiltinEngine, "load_weights", wrong_from_the_third)
    with pytest.raises(BurnishError, match=r"step 3: sampler and trainer differ by .*rl\.max_logprob_difference=0\.05"):
        run_training(*args("run", "checkpoint_period=1", "rl.max_logprob_difference=0.05"))
    assert steps(tmp_path / "run") == [1, 2]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


@pytest.fixture
def two_stops(checkpoint, tmp_path):
    """The checkpoint with a second stop token, a digit that is often sampled; its id."""
    directory = shutil.copytree(checkpoint, tmp_path / "two-stops")
    config = json.loads((directory / "generation_config.json").read_text())
    (digit,) = load_tokenizer(checkpoint).encode("7")
    config["eos_token_id"].append(digit)
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory, set(config["eos_token_id"])


def test_every_stop_token_of_the_model_ends_completions_is_trained_and_is_exported(args, tmp_path, two_stops):
    directory, stops = two_stops
    run_training(*args("run", f"load_parameters_path={directory}", "num_batches=2"))
    rows = [row for step in (1, 2) for row in read_rollouts(tmp_path / "run" / "rollouts", step)]
    stopped = [row for row in rows if row.stop_reason == "stop"]
    assert {row.completion_ids[-1] for row in stopped} == stops
    assert not any(stops & set(row.completion_ids[:-1]) for row in rows)
    assert all(not stops & set(row.completion_ids) for row in rows if row.stop_reason == "length")
    cut = [sum(row.stop_reason == "length" for row in part) / 8 for part in (rows[:8], rows[8:])]
    assert [row["truncated_fraction"] for row in metrics(tmp_path / "run")] == cut
    exported = export(tmp_path / "run" / "checkpoints" / "actor" / "2" / "model_params", tmp_path / "exported")
    assert (exported / "generation_config.json").read_bytes() == (directory / "generation_config.json").read_bytes()


def test_what_a_run_shows_and_writes_can_be_chosen(args, tmp_path, capsys):
    options = ["debug=true", "profiler=xplane", "log_period=2", "enable_checkpointing=false", "num_batches=3"]
    run_training(*args("run", *options, f"tensorboard_dir={tmp_path / 'board'}"))
    printed = capsys.readouterr().out
    (first, *_) = read_rollouts(tmp_path / "run" / "rollouts", 1)
    assert f"--- gold {first.answer}; answer 0, exact_format 0, partial_format" in printed
    assert re.findall(r"^ *(\d)/3 ", printed, re.MULTILINE) == ["2", "3"]
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert list((tmp_path / "board").glob("events.*"))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_the_demonstration_ends_with_a_verified_export(tmp_path, monkeypatch, capsys):
    def shortened(cls, args):
        return load_config(cls, [*args, "num_batches=1"] if cls is RunConfig else args)

    monkeypatch.setattr(demo_module, "load_config", shortened)
    summary = demo_module.demo(load_config(DemoConfig, [f"base_output_directory={tmp_path}", "run_name=demo"]))
    assert summary == json.loads((tmp_path / "demo" / "summary.json").read_text())
    _, params = load_params(tmp_path / "demo" / "hf")
    trained = load_model_params(tmp_path / "demo" / "checkpoints" / "actor" / "1")
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(trained), strict=True))
    printed = capsys.readouterr().out
    assert all(f"{tmp_path / 'demo' / place}" in printed for place in ("hf", "metrics.jsonl", "rollouts", "curve.png"))


def test_data_that_does_not_last_is_refused_before_anything_is_made(args, tmp_path):
    with pytest.raises(BurnishError, match=r"num_batches=7 of batch_size=2 take 14 prompts.*num_epoch=3"):
        run_training(*args("run", "num_batches=7"))
    assert not (tmp_path / "run").exists()


def test_more_tokens_than_the_model_has_positions_are_refused(args, tmp_path):
    with pytest.raises(BurnishError, match=r"max_target_length=300 .* give at most 256"):
        run_training(*args("run", "max_target_length=300"))
    assert not (tmp_path / "run").exists()
