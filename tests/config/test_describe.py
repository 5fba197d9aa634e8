"""The batch arithmetic in words."""

import pytest

from burnish.config.describe import describe_batch, notes
from burnish.config.errors import ConfigError
from burnish.config.overrides import load_config
from burnish.config.schema import RunConfig, SFTConfig


def run(*args: str) -> RunConfig:
    return load_config(RunConfig, ["load_parameters_path=m", *args])


def test_the_arithmetic_of_a_step_of_the_run_and_of_evaluation():
    cfg = run(
        "batch_size=8",
        "rl.num_generations=4",
        "rl.num_iterations=2",
        "num_batches=50",
        "train_micro_batch_size=2",
        "rollout_micro_batch_size=4",
        "max_num_seqs=10",
        "num_test_batches=10",
        "eval_batch_size=16",
        "eval_sampling_strategy=standard",
        "num_eval_passes=3",
    )
    assert describe_batch(cfg).splitlines() == [
        "Step: 8 prompts × 4 completions = 32 sequences of at most 1,024 tokens: 32,768 tokens at most.",
        "Sampling: 2 micro-batches of 4 prompts (16 sequences), 10 decoded at a time.",
        "Training: 4 micro-batches of 2 prompts (8 sequences) in rows of at most 2,048 tokens, "
        "2 optimizer updates a step.",
        "Run: 50 steps, 100 optimizer updates, 400 prompts.",
        "Evaluation: 10 batches of 16 = 160 prompts, 3 completions each (standard).",
    ]


def test_one_of_a_thing_is_singular():
    assert describe_batch(run("num_batches=1")).splitlines() == [
        "Step: 1 prompt × 2 completions = 2 sequences of at most 1,024 tokens: 2,048 tokens at most.",
        "Sampling: 1 micro-batch of 1 prompt (2 sequences), 2 decoded at a time.",
        "Training: 1 micro-batch of 1 prompt (2 sequences) in rows of at most 2,048 tokens, 1 optimizer update a step.",
        "Run: 1 step, 1 optimizer update, 1 prompt.",
        "Evaluation: 5 batches of 1 = 5 prompts, 1 completion each (greedy).",
    ]


def test_evaluation_of_nothing_and_of_everything_is_said():
    assert "Evaluation: none" in describe_batch(run("num_test_batches=0"))
    assert "all prompts of split test in batches of 4" in describe_batch(
        run("num_test_batches=-1", "eval_batch_size=4")
    )


def test_fine_tuning_counts_examples():
    cfg = load_config(SFTConfig, ["load_parameters_path=m", "train_micro_batch_size=4", "num_test_batches=0"])
    assert describe_batch(cfg, num_prompts=800).splitlines()[:4] == [
        "Step: 8 examples of at most 1,024 tokens: 8,192 tokens at most.",
        "Training: 2 micro-batches of 4 examples in rows of at most 2,048 tokens, 1 optimizer update a step.",
        "Run: 100 steps, 100 optimizer updates, 800 examples.",
        "Data: 800 examples, each prompt at most 256 tokens; 1 pass at most.",
    ]


def test_data_that_ends_before_the_run_is_refused_with_numbers_that_would_do():
    cfg = run("batch_size=8", "num_batches=50")
    describe_batch(cfg, num_prompts=400)
    with pytest.raises(ConfigError, match=r"take 400 prompts; .* 399 .*; give num_epoch=2 or num_batches=49"):
        describe_batch(cfg, num_prompts=399)
    describe_batch(run("batch_size=8", "num_batches=50", "num_epoch=2"), num_prompts=200)
    with pytest.raises(ConfigError, match=r"give num_epoch=80$"):
        describe_batch(cfg, num_prompts=5)
    with pytest.raises(ConfigError, match="no prompt has at most max_prefill_predict_length=256 tokens"):
        describe_batch(cfg, num_prompts=0)


def test_options_that_describe_a_larger_machine_are_noted_where_they_are_given():
    assert notes(run()) == []
    (note,) = notes(run("chips_per_vm=8"))
    assert note.startswith("chips_per_vm=8 changes nothing")
