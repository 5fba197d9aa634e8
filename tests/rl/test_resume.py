"""A run that is cut and resumed is the run it would have been, to the last bit; anything else is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny_runs
from tiny_runs import assert_same_run, run_training

from burnish.data import sources
from burnish.errors import BurnishError
from burnish.observe.metrics import MetricsWriter
from burnish.observe.rollouts import read_rollouts
from burnish.rl import setup, train
from burnish.rl.ahead import Batch
from burnish.rl.loading import ModelSource
from burnish.rl.run import Run
from burnish.rollout.types import Completion, Group, StopReason


class Cut(Exception):
    """The process dies here."""


@pytest.fixture
def cut(monkeypatch):
    """cut(step): the next run dies while it scores the completions of that step."""

    def cut(at_step):
        score = train._score
        calls = iter(range(at_step - 1))

        def dying(*step):
            if next(calls, None) is None:
                monkeypatch.setattr(train, "_score", score)
                raise Cut
            return score(*step)

        monkeypatch.setattr(train, "_score", dying)

    return cut


def run_with_a_cut(cut, args, tmp_path, at_step, *changes):
    """The directory of a run that dies in `at_step` and is resumed."""
    cut(at_step)
    with pytest.raises(Cut):
        run_training(*args("cut", *changes))
    run_training(*args("cut", *changes, "resume=true"))
    return tmp_path / "cut"


def test_a_resumed_run_is_the_same_to_the_last_bit(whole_run, cut, args, tmp_path):
    """Saved after step 3, which is the end of a pass over the data; steps 4 and 5 are lost and done again."""
    run = run_with_a_cut(cut, args, tmp_path, 6, "num_test_batches=2")
    assert_same_run(run, whole_run)
    summary, whole = (json.loads((r / "summary.json").read_text()) for r in (run, whole_run))
    assert summary | {"seconds": 0} == whole | {"seconds": 0}


@pytest.mark.parametrize(
    "changes",
    [
        ("rl.num_iterations=2", "rl.grpo_beta=0.1", "rl.loss_agg_mode=token-mean"),
        ("optimizer=adafactor", "weight_dtype=bfloat16"),
        ("weight_dtype=bfloat16", "mu_dtype=bfloat16"),
    ],
    ids=["several-iterations-and-a-reference", "adafactor", "bfloat16-masters"],
)
def test_every_kind_of_state_resumes(cut, args, tmp_path, changes):
    changes = (*changes, "num_batches=4", "checkpoint_period=2")
    run_training(*args("whole", *changes))
    assert_same_run(run_with_a_cut(cut, args, tmp_path, 4, *changes), tmp_path / "whole", steps=4)


def test_a_step_that_was_saved_keeps_its_metrics_when_the_process_dies_before_writing_them(
    whole_run, args, tmp_path, monkeypatch
):
    write = MetricsWriter.write

    def dying(writer, step, metrics):
        if step == 3:
            monkeypatch.undo()
            raise Cut
        write(writer, step, metrics)

    monkeypatch.setattr(MetricsWriter, "write", dying)
    with pytest.raises(Cut):
        run_training(*args("cut", "num_test_batches=2"))
    run_training(*args("cut", "num_test_batches=2", "resume=true"))
    assert_same_run(tmp_path / "cut", whole_run)


def test_a_run_whose_evaluation_was_cut_goes_on_with_it(whole_run, args, tmp_path, monkeypatch):
    evaluate = train._evaluate

    def dying(run, parts, prompts, title):
        if title.startswith("Post"):
            monkeypatch.undo()
            raise Cut
        return evaluate(run, parts, prompts, title)

    monkeypatch.setattr(train, "_evaluate", dying)
    with pytest.raises(Cut):
        run_training(*args("cut", "num_test_batches=2"))
    summary = run_training(*args("cut", "num_test_batches=2", "resume=true"))
    assert summary | {"seconds": 0} == json.loads((whole_run / "summary.json").read_text()) | {"seconds": 0}


def test_what_was_sampled_ahead_is_sampled_anew_by_a_run_that_goes_on_without(cut, args, tmp_path, monkeypatch):
    """The saved batch is one of older weights, for which a run on policy has no weights in its loss."""
    changes = ("num_batches=2", "checkpoint_period=1")
    restore = Run.restore

    def with_batch(run, model, updater):
        found = restore(run, model, updater)
        pipeline = setup.train_pipeline(
            run.cfg, model.tokenizer, sources.load_examples(setup.data_options(run.cfg), "train")
        )
        pipeline.restore(found.extra["data"])
        old = Completion(
            token_ids=np.full(3, 5, np.int32),
            logprobs=np.full(3, -9.0, np.float32),
            weight_versions=np.zeros(3, np.int32),
            stop_reason=StopReason.STOP,
            text="old",
            seed=0,
        )
        batch = Batch([Group(prompt, (old,) * 4) for prompt in next(pipeline)], 1.0)
        return replace(found, extra=found.extra | {"data": pipeline.state(), "in_flight": batch.to_json()})

    run_training(*args("whole", *changes))
    cut(2)
    with pytest.raises(Cut):
        run_training(*args("cut", *changes))
    monkeypatch.setattr(Run, "restore", with_batch)
    run_training(*args("cut", *changes, "resume=true"))
    for step in (1, 2):
        rows, others = (read_rollouts(tmp_path / name / "rollouts", step) for name in ("cut", "whole"))
        assert rows == others


@pytest.fixture
def finished(whole_run, tmp_path):
    """A copy of a finished run, as run_name=finished."""
    return shutil.copytree(whole_run, tmp_path / "finished")


def test_a_used_run_directory_is_refused(finished, args):
    with pytest.raises(BurnishError, match=r"already holds a run.*resume=true.*run_name"):
        run_training(*args("finished", "num_test_batches=2"))


def test_a_finished_run_has_nothing_to_resume(finished, args):
    with pytest.raises(BurnishError, match=r"has made 6 steps already.*num_batches above 6"):
        run_training(*args("finished", "num_test_batches=2", "resume=true"))


def test_a_resumed_run_cannot_end_before_its_checkpoint(finished, args):
    (finished / "summary.json").unlink()
    with pytest.raises(BurnishError, match="has made 6 steps already"):
        run_training(*args("finished", "num_test_batches=2", "num_batches=5", "resume=true"))


def test_a_run_resumes_with_the_batches_and_the_data_that_it_was_started_with(finished, args, questions, tmp_path):
    before = (finished / "config.yaml").read_text()
    for changes, named in [
        (("batch_size=3", "num_batches=4"), "batch_size=2 (now 3)"),
        (("dataset_name=builtin", "hf_train_files=null", "hf_eval_files=null"), "dataset_name=json (now builtin)"),
        (("seed=1",), "seed=0 (now 1)"),
    ]:
        with pytest.raises(BurnishError, match="a resumed run needs the same") as error:
            run_training(*args("finished", "resume=true", *changes))
        assert named in str(error.value)
        assert (finished / "config.yaml").read_text() == before


def test_a_finished_run_can_be_made_longer(finished, args):
    summary = run_training(*args("finished", "num_test_batches=2", "num_batches=7", "num_epoch=3", "resume=true"))
    assert summary["steps"] == 7
    assert [row["step"] for row in tiny_runs.metrics(finished)] == list(range(1, 8))


def test_resume_starts_anew_where_nothing_was_saved(whole_run, cut, args, tmp_path):
    """A scheduler restarts the same command; the first start may have been cut short."""
    assert_same_run(run_with_a_cut(cut, args, tmp_path, 2, "num_test_batches=2"), whole_run)


def test_a_longer_run_whose_evaluation_was_cut_can_be_finished(finished, args, monkeypatch):
    longer = args("finished", "num_test_batches=2", "num_batches=7", "num_epoch=3", "resume=true")
    evaluate = train._evaluate

    def dying(run, parts, prompts, title):
        monkeypatch.undo()
        raise Cut

    monkeypatch.setattr(train, "_evaluate", dying)
    with pytest.raises(Cut):
        run_training(*longer)
    assert train._evaluate is evaluate
    assert not (finished / "summary.json").exists()
    assert not (finished / "curve.png").exists()
    assert run_training(*longer)["steps"] == 7
    assert (finished / "curve.png").exists()


def test_a_run_over_other_data_is_refused(finished, args, questions, tmp_path):
    rows = questions.read_text().splitlines(keepends=True)
    longer = ["num_test_batches=2", "num_batches=7", "num_epoch=5", "resume=true"]
    try:
        for changed in (rows[:-1], [*rows[:-1], rows[0]]):
            questions.write_text("".join(changed))
            with pytest.raises(BurnishError, match=r"training data .*hf_train_files.* is not what the run was started"):
                run_training(*args("finished", *longer))
    finally:
        questions.write_text("".join(rows))


def test_files_of_a_run_that_were_damaged_are_named(finished, args):
    longer = args("finished", "num_test_batches=2", "num_batches=7", "num_epoch=3", "resume=true")
    config = (finished / "config.yaml").read_text()
    (finished / "config.yaml").write_text("")
    with pytest.raises(BurnishError, match=r"config.yaml is empty or damaged"):
        run_training(*longer)
    (finished / "config.yaml").write_text(config)
    lines = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)
    (finished / "metrics.jsonl").write_text("".join([*lines[:2], "garbage\n", *lines[2:]]))
    with pytest.raises(BurnishError, match=r"metrics.jsonl line 3 is no metrics line: 'garbage'"):
        run_training(*longer)


def test_a_start_that_failed_leaves_the_name_free(args, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise BurnishError("the weights are broken")

    with monkeypatch.context() as patch:
        patch.setattr(ModelSource, "load", broken)
        with pytest.raises(BurnishError, match="weights are broken"):
            run_training(*args("run", "num_batches=1", "seed=1"))
    assert (tmp_path / "run" / "config.yaml").exists()
    run_training(*args("run", "num_batches=1"))
