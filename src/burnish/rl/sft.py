"""`burnish sft`: supervised fine-tuning, cross-entropy on completions only, through the same packing and update as
training with rewards. An example's loss counts by its tokens (mean over all completion tokens of a step)."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from burnish.checkpoints.run_dir import RunDirectory
from burnish.config.describe import describe_batch
from burnish.config.schema import SFTConfig
from burnish.data import sources
from burnish.data.tokenizer import Tokenizer
from burnish.data.types import Prompt
from burnish.models.params import Params, init_params
from burnish.observe.summary import print_final, write_summary
from burnish.parallel import distributed, processes
from burnish.rl import setup
from burnish.rl.devices import check_model, trainer_mesh, trainer_sizes
from burnish.rl.loading import ModelSource, open_model
from burnish.rl.packing import pack_examples
from burnish.rl.run import Run, Stopped, open_run, plain_metrics, same_options
from burnish.rl.types import PackedStep
from burnish.rl.update import Updater


def sft(cfg: SFTConfig) -> dict[str, Any]:
    """Run the whole fine-tuning and return its summary. Raises BurnishError for what is the user's to fix."""
    distributed.start()
    with distributed.others_needed():
        return _sft(same_options(cfg))


def _sft(cfg: SFTConfig) -> dict[str, Any]:
    processes.by_first(lambda: RunDirectory(cfg.base_output_directory, cfg.run_name).check(cfg.resume))
    mesh = trainer_mesh(cfg, jax.devices())
    model = open_model(cfg)
    check_model(model.spec, trainer_sizes(cfg, jax.devices()))
    data, tags = setup.data_options(cfg), setup.tags(cfg)
    pipeline = setup.train_pipeline(cfg, model.tokenizer, sources.load_demonstrations(data, "train", tags))
    eval_prompts: list[Prompt] = []
    if cfg.num_test_batches:
        eval_prompts = setup.eval_prompts(cfg, model.tokenizer, sources.load_demonstrations(data, "eval", tags))
    arithmetic = describe_batch(cfg, pipeline.num_prompts)

    with open_run(cfg, model) as run:
        for line in (model.describe(), *arithmetic.splitlines()):
            run.printer.note(line)
        updater = Updater(model.spec, setup.update_options(cfg), mesh)
        run.check_space(model, updater)
        restored = run.restore(model, updater)
        if restored is None:
            state, start = updater.init(_weights(cfg, model, updater)), 0
            extra: dict[str, Any] = {"seconds": 0.0, "before": None, "metrics": None}
        else:
            state, extra, start = restored.state, restored.extra, restored.step
            pipeline.restore(extra["data"])
        clock = time.perf_counter() - extra["seconds"]
        before: float | None = extra["before"]
        metrics: dict[str, float] = {}

        def saved(position: dict[str, Any]) -> dict[str, Any]:
            seconds = time.perf_counter() - clock
            return {"data": position, "seconds": seconds, "before": before, "metrics": plain_metrics(metrics)}

        with run.writers(start, extra["metrics"]) as writer:
            step, position = start, pipeline.state()
            try:
                if before is None and eval_prompts and start == 0:
                    before = _mean_loss(run, updater, state.params, model.tokenizer, eval_prompts)
                    run.printer.note(f"Evaluation loss before: {before:.4f} nats a token")
                for step in range(start + 1, cfg.num_batches + 1):
                    position = pipeline.state()
                    run.check_stop()
                    t0 = time.perf_counter()
                    packed, lengths = _pack(cfg, model.tokenizer, next(pipeline), updater.rows)
                    with run.profiled(step, start + 1):
                        state, update, _ = updater.step(state, packed)
                        loss = float(update["loss"])
                    seconds = time.perf_counter() - t0
                    metrics = {
                        "loss": loss,
                        "entropy": float(update["entropy"]),
                        "grad_norm": float(update["grad_norm"]),
                        "weights_changed": float(update["changed_fraction"]),
                        "learning_rate": float(update["learning_rate"]),
                        "completion_length/mean": float(lengths.mean()),
                        "completion_length/max": float(lengths.max()),
                        "seconds/update": seconds,
                        "seconds/step": seconds,
                        "tokens_per_second/update": packed.row_tokens / seconds,
                        "compilations": updater.num_compilations,
                    }
                    ended_badly = run.ended_badly(step, state)
                    run.note_skipped(step, int(int(state.skipped_in_a_row) > 0))
                    due = run.is_due(step) and not ended_badly
                    saving = run.save(step, state, saved(pipeline.state())) if due else 0.0
                    metrics["seconds/checkpoint"] = saving
                    metrics["seconds/step"] += saving
                    writer.write(step, metrics)
                    if step % cfg.log_period == 0 or step == cfg.num_batches:
                        run.printer.step(step, metrics)
                    if ended_badly:
                        raise run.ruined(state)
            except Stopped:
                done = max(step - 1, start)
                if done:
                    run.save(done, state, saved(position))
                raise run.end_for_restart(done) from None
        summary: dict[str, Any] = {"steps": cfg.num_batches, "seconds": time.perf_counter() - clock}
        if eval_prompts:
            try:
                after = _mean_loss(run, updater, state.params, model.tokenizer, eval_prompts)
            except Stopped:
                raise run.end_for_restart(cfg.num_batches) from None
            run.printer.note(f"Evaluation loss after: {after:.4f} nats a token")
            summary |= {"loss_before": before, "loss_after": after}
        processes.by_first(lambda: write_summary(run.directory.summary, summary))
        places = {"metrics": run.directory.metrics, "summary": run.directory.summary}
        if cfg.enable_checkpointing:
            places = {"weights": run.directory.checkpoints / str(cfg.num_batches) / "model_params", **places}
    if processes.is_first():
        print_final([], summary["seconds"], places)
    return summary


def _weights(cfg: SFTConfig, model: ModelSource, updater: Updater) -> Params:
    """The weights to start from, on the updater's devices."""
    shardings = updater.state_shardings.params
    if not cfg.random_init:
        return model.load(cfg.weight_dtype, shardings=shardings)
    init = partial(init_params, model.spec, dtype=cfg.weight_dtype)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(cfg.seed))


def _pack(cfg: SFTConfig, tokenizer: Tokenizer, prompts: Sequence[Prompt], rows: int) -> tuple[PackedStep, np.ndarray]:
    """The examples of a step in rows, and their completion lengths. `Prompt.answer` is the completion to learn.
    Completions are cut where prompt and completion exceed max_target_length, as generation would be."""
    examples = []
    for prompt in prompts:
        completion = tokenizer.encode_completion(prompt.answer)
        examples.append((prompt.token_ids, completion[: cfg.max_target_length - len(prompt.token_ids)]))
    packed = pack_examples(
        examples, max_tokens=cfg.train_row_tokens, max_groups=cfg.resolved_train_micro_batch_size, rows=rows
    )
    return packed, np.array([len(completion) for _, completion in examples])


def _mean_loss(run: Run, updater: Updater, params: Params, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> float:
    """Mean cross-entropy per completion token, nats."""
    total, count = 0.0, 0
    size = run.cfg.resolved_eval_batch_size
    for i in range(0, len(prompts), size):
        run.check_stop()
        packed, lengths = _pack(run.cfg, tokenizer, prompts[i : i + size], updater.rows)  # type: ignore[arg-type]
        logprobs = updater.logprobs(params, packed)
        total -= sum(float(np.sum(lp, where=b.trained)) for lp, b in zip(logprobs, packed.micro_batches, strict=True))
        count += int(lengths.sum())
    return total / count
