"""Supervised fine-tuning: only completions are learnt, the loss is their mean cross-entropy, and a cut run resumes to
the last bit."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_rl
from tiny_runs import assert_same_run, metrics, saved, write_questions

from burnish.checkpoints.hf_import import load_params
from burnish.config.overrides import load_config
from burnish.config.schema import SFTConfig
from burnish.data.templates import PromptTemplate
from burnish.data.tokenizer import load_tokenizer
from burnish.errors import BurnishError
from burnish.observe.metrics import METRICS
from burnish.rl import sft as sft_module
from burnish.rl.sft import sft

OPTIONS = (
    "dataset_name=json",
    "max_prefill_predict_length=72",
    "max_target_length=96",
    "batch_size=3",
    "num_batches=4",
    "num_epoch=8",
    "num_test_batches=1",
    "checkpoint_period=2",
    "learning_rate=0.01",
    "dtype=float32",
    "reasoning_start_token=e",
    "reasoning_end_token=t",
)
ANSWERS = ["three apples", "There are 12.", "7", "He has 3 + 4 = 7 apples and 5 pears.", "16", "none"]


@pytest.fixture
def args(checkpoint, tmp_path):
    examples = write_questions(tmp_path / "examples.jsonl", ANSWERS)

    def args(name, *changes):
        return [
            *OPTIONS,
            f"load_parameters_path={checkpoint}",
            f"hf_train_files={examples}",
            f"hf_eval_files={examples}",
            f"base_output_directory={tmp_path}",
            f"run_name={name}",
            *changes,
        ]

    return args


def run_sft(*args):
    return sft(load_config(SFTConfig, list(args)))


@pytest.fixture
def two(args, tmp_path):
    """A file with two of the examples."""
    examples = Path(load_config(SFTConfig, args("two")).hf_train_files[0]).read_text().splitlines(keepends=True)
    (tmp_path / "two.jsonl").write_text("".join(examples[1:4:2]))
    return tmp_path / "two.jsonl"


def examples_of(checkpoint, file):
    """(prompt ids, completion ids) of every example, rendered here."""
    tokenizer = load_tokenizer(checkpoint)
    template = PromptTemplate.load("gsm8k_rl.json", "e", "t", "<answer>", "</answer>")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return tuple(
        (
            tokenizer.render_prompt(template.render(row["question"])).token_ids,
            tuple(tokenizer.encode_completion(row["answer"])),
        )
        for row in rows
    )


@partial(jax.jit, static_argnums=(1, 2))
@partial(jax.value_and_grad, argnums=0)
def plain_loss(params, spec, examples):
    """Mean cross-entropy over all completion tokens, and its gradient; each example from its own unpadded row."""
    logprobs = [tiny_rl.row_logprobs(params, prompt, completion, 1.0, spec) for prompt, completion in examples]
    return -jnp.sum(jnp.concatenate(logprobs)) / sum(len(lp) for lp in logprobs)


def test_only_completions_are_learnt(checkpoint, args, two, tmp_path):
    """Loss and gradient of one step with all examples are those of the completions' mean cross-entropy."""
    run_sft(*args("run", f"hf_train_files={two}", "batch_size=2", "num_batches=1", "num_test_batches=0"))
    spec, params = load_params(checkpoint)
    loss, gradient = plain_loss(params, spec, examples_of(checkpoint, two))
    (row,) = metrics(tmp_path / "run")
    assert row["loss"] == pytest.approx(float(loss), rel=1e-5)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(gradient)))
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_loss_falls_and_the_summary_says_so(checkpoint, args, two, tmp_path):
    summary = run_sft(*args("run", "num_batches=16", f"hf_eval_files={two}", "eval_batch_size=2"))
    losses = [row["loss"] for row in metrics(tmp_path / "run")]
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
    assert summary["loss_after"] < 0.7 * summary["loss_before"]
    assert summary["steps"] == 16
    spec, params = load_params(checkpoint)
    loss, _ = plain_loss(params, spec, examples_of(checkpoint, two))
    assert summary["loss_before"] == pytest.approx(float(loss))


def test_completions_are_cut_at_the_length_that_is_generated_at_most(checkpoint, args, two, tmp_path):
    lengths = [(len(prompt), len(completion)) for prompt, completion in examples_of(checkpoint, two)]
    limit = max(map(sum, lengths)) - 2
    assert max(prompt for prompt, _ in lengths) < min(map(sum, lengths)) < limit
    cut = ["batch_size=2", f"max_prefill_predict_length={limit - 1}", f"max_target_length={limit}"]
    run_sft(*args("run", *cut, f"hf_train_files={two}", "num_batches=1", "num_test_batches=0"))
    assert metrics(tmp_path / "run")[0]["completion_length/mean"] == np.mean([min(c, limit - p) for p, c in lengths])


def test_its_metrics_are_described(args, tmp_path):
    run_sft(*args("run", "num_batches=1", "num_test_batches=0"))
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row.keys() - {"step"} <= METRICS.keys()
    assert {"loss", "grad_norm", "learning_rate", "seconds/step", "tokens_per_second/update"} <= row.keys()


@pytest.fixture
def whole(args, tmp_path):
    run_sft(*args("whole"))
    return tmp_path / "whole"


def test_a_cut_run_resumes_to_the_last_bit(whole, args, tmp_path, monkeypatch):
    """Told to end in step 4 after the save of step 2, and once more during the evaluation after the last step."""
    for name, call in (("_pack", 5), ("_mean_loss", 1)):
        function, left = getattr(sft_module, name), iter(range(call - 1))

        def counted(*arguments, function=function, left=left):
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGTERM)
            return function(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(sft_module, name, counted)
            with pytest.raises(BurnishError, match=r"SIGTERM .* is saved") as error:
                run_sft(*args("run", "resume=true"))
        assert error.value.exit_code == 75
    summary = run_sft(*args("run", "resume=true"))
    assert_same_run(tmp_path / "run", whole, steps=4)
    assert summary | {"seconds": 0} == json.loads((whole / "summary.json").read_text()) | {"seconds": 0}
    with pytest.raises(BurnishError, match="has made 4 steps already"):
        run_sft(*args("run", "resume=true"))


def test_weights_can_start_at_random(checkpoint, args, tmp_path):
    """load_parameters_path then needs no weights; another seed is another start."""
    directory = tmp_path / "without-weights"
    directory.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    random = [f"load_parameters_path={directory}", "random_init=true", "num_batches=1", "num_test_batches=0"]
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_sft(*args(name, *random, f"seed={seed}"))
        losses.append(metrics(tmp_path / name)[0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_the_result_does_not_depend_on_micro_batches(args, tmp_path):
    for name, size in (("whole", -1), ("single", 1)):
        run_sft(*args(name, "batch_size=6", "num_batches=2", "num_test_batches=0", f"train_micro_batch_size={size}"))
    arrays, expected = (saved(tmp_path / name, 2)[0] for name in ("single", "whole"))
    for name, array in expected.items():
        if name.startswith("model_params"):
            assert np.linalg.norm(arrays[name] - array) < 1e-5 * np.linalg.norm(array), name
