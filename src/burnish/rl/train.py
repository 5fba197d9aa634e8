"""`burnish train-rl`: GRPO with verifiable rewards, from checkpoint to checkpoint.

One step: sample a group of completions for each prompt of a batch, score them, make one or more updates on them, hand
the new weights to the sampler. A step's randomness is a function of the run's seed and the step's number, so that a
resumed run is the run it would have been. This module is the order of things; what they do is in the other modules.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from burnish.checkpoints.run_dir import RunDirectory
from burnish.config.describe import describe_batch, notes
from burnish.config.schema import RunConfig
from burnish.data import sources
from burnish.data.pipeline import PromptPipeline
from burnish.data.types import Prompt
from burnish.errors import BurnishError
from burnish.models.params import Params
from burnish.observe.curve import plot_rewards
from burnish.observe.metrics import REWARD_PART, read_metrics
from burnish.observe.rollouts import RolloutRow, write_rollouts
from burnish.observe.summary import BeforeAfter, print_final, write_summary
from burnish.parallel import distributed, processes
from burnish.rewards.metrics import EvalStats, format_eval_line
from burnish.rewards.probe import probe
from burnish.rewards.stack import RewardStack
from burnish.rewards.types import Score, ScoreStatus
from burnish.rl import setup
from burnish.rl.advantages import group_advantages
from burnish.rl.ahead import Batch, SamplingAhead
from burnish.rl.devices import (
    Devices,
    check_model,
    choose_devices,
    describe,
    sampler_mesh,
    trainer_mesh,
    trainer_sizes,
)
from burnish.rl.evaluate import evaluate_prompts, score_groups
from burnish.rl.loading import ModelSource, open_model
from burnish.rl.optimizer import TrainState
from burnish.rl.packing import pack
from burnish.rl.run import Run, Stopped, open_run, plain_metrics, same_options
from burnish.rl.update import Updater, with_logprobs
from burnish.rollout.types import Group, RolloutEngine, StopReason

PROBE_PROMPTS = 8


@dataclass(frozen=True)
class Parts:
    """The objects that a step works with."""

    cfg: RunConfig
    model: ModelSource
    engine: RolloutEngine
    stack: RewardStack
    updater: Updater
    reference: Params | None  # weights of the KL penalty


@dataclass(frozen=True)
class Found:
    """What a run starts from, on this process's machine."""

    devices: Devices
    training: Mesh
    sampling: Mesh
    model: ModelSource
    pipeline: PromptPipeline
    eval_prompts: list[Prompt]

    def digests(self) -> dict[str, str]:
        """What all processes have to have alike."""
        first = _probe_prompts(self.pipeline, self.eval_prompts)
        return {
            "the model's config.json": _digest(self.model.spec),
            "the training data": self.pipeline.state()["fingerprint"],
            "what template and tokenizer make of it": _digest([prompt.token_ids for prompt in first]),
            "the evaluation's data": _digest(self.eval_prompts),
        }


@dataclass(frozen=True)
class Outcome:
    """What a finished run has to show."""

    summary: dict[str, Any]
    figures: list[BeforeAfter]
    places: dict[str, epath.Path]


@dataclass(frozen=True)
class Sampled:
    """A step's completions with their scores and advantages, all (P, G)."""

    groups: list[Group]
    scores: list[list[Score]]
    valid: np.ndarray  # bool: scored, and not masked as truncated
    advantages: np.ndarray  # float64


def train(cfg: RunConfig) -> dict[str, Any]:
    """Run the whole training, print what it came to and return its summary. Raises BurnishError."""
    outcome = run_training(cfg)
    if not processes.is_first():
        return outcome.summary
    print_final(outcome.figures, outcome.summary["seconds"], outcome.places)
    if "weights" in outcome.places:
        print(
            f"To export: burnish to-huggingface load_parameters_path={outcome.places['weights']} "
            "base_output_directory=<new directory>"
        )
    return outcome.summary


def run_training(cfg: RunConfig) -> Outcome:
    """Run the whole training. Raises BurnishError for everything that is the user's to fix."""
    distributed.start()
    with distributed.others_needed():
        return _run_training(same_options(cfg))


def _run_training(cfg: RunConfig) -> Outcome:
    processes.by_first(lambda: RunDirectory(cfg.base_output_directory, cfg.run_name).check(cfg.resume))
    found = processes.together(lambda: _find(cfg))
    processes.same_inputs(found.digests())
    devices, model, pipeline, eval_prompts = found.devices, found.model, found.pipeline, found.eval_prompts
    training, sampling = found.training, found.sampling
    arithmetic = describe_batch(cfg, pipeline.num_prompts)

    with RewardStack(setup.reward_options(cfg)) as stack, open_run(cfg, model) as run, ExitStack() as opened:
        for line in _opening(cfg, model, pipeline, arithmetic, describe(cfg, training, sampling)):
            run.printer.note(line)
        updater = Updater(model.spec, setup.update_options(cfg), training)
        max_slots = min(cfg.resolved_max_num_seqs, cfg.resolved_rollout_micro_batch_size * cfg.rl.num_generations)
        longest = max([pipeline.longest_prompt, *(len(prompt.token_ids) for prompt in eval_prompts)])
        note, wait, log = run.printer.note, run.check_stop, run.directory.vllm_log
        try:
            for line in _probe(run, stack, _probe_prompts(pipeline, eval_prompts)):
                note(line)
            engine = opened.enter_context(
                setup.open_engine(model, cfg, devices.sampler, longest, max_slots, note, wait, log)
            )
        except Stopped:
            raise run.end_for_restart((run.latest_step() or 0) if cfg.resume else 0) from None
        run.check_space(model, updater)
        restored = run.restore(model, updater)
        initial: Params | None = None
        if restored is None or cfg.rl.grpo_beta:
            run.printer.phase("reading weights")
            initial = model.load(cfg.weight_dtype, shardings=updater.state_shardings.params)
        if restored is None:
            assert initial is not None
            # The update consumes its weights; those of the penalty stay.
            params = jax.tree.map(jnp.copy, initial) if cfg.rl.grpo_beta else initial
            state, start = updater.init(params), 0
            extra: dict[str, Any] = {"seconds": 0.0, "before": None, "metrics": None, "in_flight": None}
            del params
        else:
            state, extra, start = restored.state, restored.extra, restored.step
            pipeline.restore(extra["data"])
        reference = initial if cfg.rl.grpo_beta else None
        del initial
        parts = Parts(cfg, model, engine, stack, updater, reference)
        return _run(run, parts, pipeline, eval_prompts, state, extra, start)


def _probe(run: Run, stack: RewardStack, prompts: Sequence[Prompt]) -> list[str]:
    """What the first process finds out about the rewards."""

    def call(on_wait: Callable[[], None] | None) -> list[str]:
        return probe(stack, prompts, on_wait).lines() if processes.is_first() else []

    return processes.together_while(call, run.check_stop)


def _find(cfg: RunConfig) -> Found:
    """Devices, model and data, everything but weights. Raises BurnishError where they do not go together."""
    devices = choose_devices(cfg)
    training, sampling = trainer_mesh(cfg, devices.trainer), sampler_mesh(cfg, devices.sampler)
    model = open_model(cfg)
    check_model(model.spec, trainer_sizes(cfg, devices.trainer))
    setup.check_sampler(cfg, model.spec, devices.sampler)
    data = setup.data_options(cfg)
    pipeline = setup.train_pipeline(cfg, model.tokenizer, sources.load_examples(data, "train"))
    eval_prompts: list[Prompt] = []
    if cfg.num_test_batches:
        eval_prompts = setup.eval_prompts(cfg, model.tokenizer, sources.load_examples(data, "eval"))
    return Found(devices, training, sampling, model, pipeline, eval_prompts)


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _probe_prompts(pipeline: PromptPipeline, eval_prompts: Sequence[Prompt]) -> list[Prompt]:
    """A few prompts to try the rewards on; the pipeline is left where it was."""
    if eval_prompts:
        return list(eval_prompts[:PROBE_PROMPTS])
    position = pipeline.state()
    prompts = next(pipeline)[:PROBE_PROMPTS]
    pipeline.restore(position)
    return prompts


def _opening(
    cfg: RunConfig, model: ModelSource, pipeline: PromptPipeline, arithmetic: str, devices: Sequence[str]
) -> list[str]:
    """What is said before anything expensive starts."""
    corners = ", ".join(f"{lr:.3g} at update {n + 1}" for n, lr in setup.schedule(cfg).corner_points()[:-1])
    dropped = (
        f"; {pipeline.num_dropped} longer than max_prefill_predict_length left out" if pipeline.num_dropped else ""
    )
    return [
        model.describe(),
        *devices,
        *arithmetic.splitlines(),
        f"Prompts: {pipeline.num_prompts:,} read{dropped}",
        f"Learning rate: {corners}, towards 0 at update {setup.schedule(cfg).total_steps + 1}",
        *notes(cfg),
    ]


def _run(
    run: Run,
    parts: Parts,
    pipeline: PromptPipeline,
    eval_prompts: Sequence[Prompt],
    state: TrainState,
    extra: dict[str, Any],
    start: int,
) -> Outcome:
    """Evaluation before, the steps, evaluation after, summary."""
    cfg, printer = parts.cfg, run.printer
    clock = time.perf_counter() - extra["seconds"]  # a resumed run goes on counting
    metrics: dict[str, float] = {}

    def saved(position: Mapping[str, Any]) -> dict[str, Any]:
        seconds = time.perf_counter() - clock
        return {
            **position,
            "seconds": seconds,
            "before": before and asdict(before),
            "metrics": plain_metrics(metrics),
        }

    def here(batch: Batch | None) -> dict[str, Any]:
        """Where the next step begins: the position in the data, and its completions where they are sampled."""
        return {"data": pipeline.state(), "in_flight": batch and batch.to_json()}

    _hand_over(run, parts, state, start)
    before = EvalStats(**extra["before"]) if extra["before"] else None
    with ExitStack() as stack:
        writer = stack.enter_context(run.writers(start, extra["metrics"]))
        ahead: SamplingAhead | None = None
        if cfg.rl.off_policy_steps:
            ahead = stack.enter_context(SamplingAhead(lambda *batch: _sample(parts, *batch)))
        step = start
        batch = Batch.from_json(extra["in_flight"]) if extra["in_flight"] else None
        position = here(batch)
        try:
            if before is None and eval_prompts and start == 0:
                before = _evaluate(run, parts, eval_prompts, "Pre RL Training")
            for step in range(start + 1, cfg.num_batches + 1):
                position = here(batch)
                run.check_stop()
                with run.profiled(step, start + 1):
                    if batch is None:
                        batch = _sample_now(run, parts, step, next(pipeline))
                    elif ahead is None:  # saved by a run that sampled ahead, with older weights than these
                        batch = _sample_now(run, parts, step, [group.prompt for group in batch.groups])
                    if ahead is not None and step < cfg.num_batches:
                        ahead.start(step + 1, next(pipeline))
                    state, metrics, batch = _step(run, parts, state, step, batch, ahead)
                run.note_skipped(step, int(metrics["nonfinite_updates"]))
                seconds, ended_badly = 0.0, run.ended_badly(step, state)
                if run.is_due(step) and not ended_badly:
                    seconds = run.save(step, state, saved(here(batch)))
                metrics["seconds/checkpoint"] = seconds
                metrics["seconds/step"] += seconds
                writer.write(step, metrics)
                if step % cfg.log_period == 0 or step == cfg.num_batches:
                    printer.step(step, metrics)
                if ended_badly:
                    raise run.ruined(state)
        except Stopped:
            done = max(step - 1, start)
            if done:
                run.save(done, state, saved(position))
            raise run.end_for_restart(done) from None
    try:
        after = _evaluate(run, parts, eval_prompts, "Post RL Training") if eval_prompts else None
    except Stopped:
        raise run.end_for_restart(cfg.num_batches) from None
    return _finish(run, before, after, time.perf_counter() - clock)


def _step(
    run: Run, parts: Parts, state: TrainState, step: int, batch: Batch, ahead: SamplingAhead | None
) -> tuple[TrainState, dict[str, float], Batch | None]:
    """One training step on the completions of `batch`; state is consumed only once nothing can stop it any more. The
    third result is the next step's batch, where that is sampled meanwhile."""
    cfg = parts.cfg
    t0 = time.perf_counter()
    if not cfg.has_split_devices:
        parts.engine.release_memory()
    run.printer.phase(f"step {step}: scoring")
    sampled = _score(run, parts, batch.groups)
    t1 = time.perf_counter()
    run.check_stop()
    run.printer.phase(f"step {step}: updating")
    state, update_metrics, trained_tokens = _update(parts, state, sampled)
    t2 = time.perf_counter()
    run.printer.phase(f"step {step}: waiting for the next completions")
    following = None if ahead is None else ahead.wait()
    t3 = time.perf_counter()
    moved = _hand_over(run, parts, state, step)
    t4 = time.perf_counter()
    if processes.is_first():
        write_rollouts(run.directory.rollouts, step, _rows(step, sampled))
    if cfg.debug:
        _show_one(run, sampled)

    update_seconds = t2 - t1 + t4 - t3
    metrics = _sample_metrics(sampled) | update_metrics
    metrics |= {
        "seconds/sampling": batch.seconds,
        "seconds/reward": t1 - t0,
        "seconds/update": update_seconds,
        "seconds/step": time.perf_counter() - t0 + (0.0 if ahead else batch.seconds),
        "tokens_per_second/sampling": batch.num_tokens / batch.seconds,
        "tokens_per_second/update": trained_tokens / update_seconds,
        "compilations": parts.engine.num_compilations + parts.updater.num_compilations,
    }
    if ahead is not None:
        versions = np.concatenate([c.weight_versions for g in batch.groups for c in g.completions])
        metrics |= {"seconds/waiting": t3 - t2, "off_policy/steps": float(np.mean(step - 1 - versions))}
    if moved is not None:
        metrics["seconds/reshard"] = moved
    _stop_on_difference(cfg, step, metrics)
    return state, metrics, following


def _hand_over(run: Run, parts: Parts, state: TrainState, step: int) -> float | None:
    """The sampler gets the weights after `step` steps; the seconds that took where they went to other devices."""
    try:
        moved = parts.engine.load_weights(state.params, step)
    except Stopped:
        return None  # the step has been made: it ends as others do, and the run before the next one
    if moved is None:
        return None
    run.printer.note(str(moved))
    return moved.seconds


def _sample_now(run: Run, parts: Parts, step: int, prompts: Sequence[Prompt]) -> Batch:
    """The step's batch, with its progress in the terminal and while a stop can still be asked for."""
    total = len(prompts) * parts.cfg.rl.num_generations

    def progress(finished: int, tokens: int) -> None:
        run.printer.sampling(f"step {step}: sampling", finished, total, tokens)
        run.check_stop()

    start = time.perf_counter()
    groups = _sample(parts, step, prompts, progress)
    return Batch(groups, time.perf_counter() - start)


def _sample(parts: Parts, step: int, prompts: Sequence[Prompt], on_progress: Callable[[int, int], None]) -> list[Group]:
    """A group of completions per prompt, one rollout micro-batch after the other."""
    cfg = parts.cfg
    sampling = setup.sampling_params(cfg, parts.model.tokenizer)
    seeds = setup.completion_seeds(cfg.seed, "training", step, prompts, cfg.rl.num_generations)
    size = cfg.resolved_rollout_micro_batch_size
    groups: list[Group] = []
    tokens_before = 0

    def progress(finished: int, tokens: int) -> None:
        on_progress(len(groups) * cfg.rl.num_generations + finished, tokens_before + tokens)

    for i in range(0, len(prompts), size):
        new = parts.engine.generate(prompts[i : i + size], seeds[i : i + size], sampling, progress)
        groups += new
        tokens_before += sum(len(c.token_ids) for g in new for c in g.completions)
    return groups


def _score(run: Run, parts: Parts, groups: list[Group]) -> Sampled:
    """Scores and group-relative advantages."""
    scores = score_groups(parts.stack, groups, run.check_stop)
    masked = StopReason.LENGTH if parts.cfg.rl.mask_truncated_completions else None
    valid = np.array(
        [
            [
                s.status is ScoreStatus.SCORED and c.stop_reason is not masked
                for s, c in zip(row, g.completions, strict=True)
            ]
            for row, g in zip(scores, groups, strict=True)
        ]
    )
    rewards = np.array([[s.total for s in row] for row in scores], np.float64)
    return Sampled(groups, scores, valid, group_advantages(rewards, valid, parts.cfg.rl.advantage_std))


def _update(parts: Parts, state: TrainState, sampled: Sampled) -> tuple[TrainState, dict[str, float], int]:
    """rl.num_iterations updates on one batch. Metrics of the last one (|Δlogprob| of the first, where sampler and
    trainer have the same weights), and the number of tokens that went through the model in each."""
    cfg, updater = parts.cfg, parts.updater
    packed = pack(
        sampled.groups,
        sampled.advantages,
        sampled.valid,
        max_tokens=cfg.train_row_tokens,
        max_groups=cfg.resolved_train_micro_batch_size,
        rows=updater.rows,
        keep_zero_advantages=cfg.rl.grpo_beta > 0,
    )
    if parts.reference is not None:
        packed = with_logprobs(packed, reference=updater.logprobs(parts.reference, packed))
    skipped = int(state.skipped)
    first: Mapping[str, Any] = {}
    for iteration in range(cfg.rl.num_iterations):
        state, metrics, logprobs = updater.step(state, packed)
        if iteration == 0:
            first = metrics
            packed = with_logprobs(packed, old=logprobs)
    result = {
        "loss": metrics.get("loss", 0.0),
        "grad_norm": metrics["grad_norm"],
        "weights_changed": metrics["changed_fraction"],
        "learning_rate": metrics["learning_rate"],
        "nonfinite_updates": int(state.skipped) - skipped,
        "clip_fraction": metrics.get("clip_fraction", 0.0),
        **{name: value for name, value in metrics.items() if name.startswith("experts/")},
    }
    if "kl" in metrics:
        result["kl"] = metrics["kl"]
    if packed.micro_batches:
        result |= {
            "entropy": first["entropy"],
            "logprob_difference/mean": first["logprob_difference_mean"],
            "logprob_difference/max": first["logprob_difference_max"],
        }
    if "importance_weight" in first:
        result |= {
            "off_policy/weight": first["importance_weight"],
            "off_policy/truncated": first["importance_truncated"],
        }
    return state, {k: float(v) for k, v in result.items()}, packed.row_tokens


def _sample_metrics(sampled: Sampled) -> dict[str, float]:
    """Figures of the step's completions, before any update."""
    scores = [s for row in sampled.scores for s in row]
    completions = [c for g in sampled.groups for c in g.completions]
    totals = np.array([s.total for s in scores if s.status is ScoreStatus.SCORED] or [0.0])
    lengths = np.array([len(c.token_ids) for c in completions])
    parts = {name: float(np.mean([s.parts[name] for s in scores])) for name in scores[0].parts}
    return {
        "reward/mean": float(totals.mean()),
        "reward/std": float(totals.std()),
        **{f"{REWARD_PART}{name}": value for name, value in parts.items()},
        "accuracy": float(np.mean([s.correct for s in scores])),
        "partial_accuracy": float(np.mean([s.partially_correct for s in scores])),
        "format_accuracy": float(np.mean([s.format_ok for s in scores])),
        "completion_length/mean": float(lengths.mean()),
        "completion_length/max": float(lengths.max()),
        "truncated_fraction": float(np.mean([c.stop_reason is StopReason.LENGTH for c in completions])),
        "zero_advantage_groups": float(np.mean([not row.any() for row in sampled.advantages])),
        "scores/timed_out": float(sum(s.status is ScoreStatus.TIMED_OUT for s in scores)),
        "scores/failed": float(sum(s.status is ScoreStatus.FAILED for s in scores)),
    }


def _stop_on_difference(cfg: RunConfig, step: int, metrics: Mapping[str, float]) -> None:
    limit, found = cfg.rl.max_logprob_difference, metrics.get("logprob_difference/mean", 0.0)
    if limit is not None and not found <= limit and metrics.get("off_policy/steps"):
        raise BurnishError(
            f"step {step}: the weights that sampled and those before the update differ by {found:.3g} nats a token on "
            f"average, above rl.max_logprob_difference={limit:g}: one update changed too much for its successor to use "
            "what was sampled meanwhile. Lower learning_rate, or give rl.off_policy_steps=0; null switches this off"
        )
    if limit is not None and not found <= limit:
        raise BurnishError(
            f"step {step}: sampler and trainer differ by {found:.3g} nats a token on average, above "
            f"rl.max_logprob_difference={limit:g}: they do not run the same model, and training on it would be wrong. "
            "The last checkpoint is from before this step. dtype=float32 rules rounding out; null switches this off"
        )


def _rows(step: int, sampled: Sampled) -> list[RolloutRow]:
    return [
        RolloutRow(
            step=step,
            prompt_index=group.prompt.index,
            question=group.prompt.question,
            answer=group.prompt.answer,
            prompt_ids=list(group.prompt.token_ids),
            completion_ids=completion.token_ids.tolist(),
            completion=completion.text,
            logprobs=completion.logprobs.tolist(),
            weight_versions=completion.weight_versions.tolist(),
            stop_reason=str(completion.stop_reason),
            seed=completion.seed,
            reward_parts=score.parts,
            reward=score.total,
            advantage=float(advantage),
            score_status=str(score.status),
            correct=score.correct,
            format_ok=score.format_ok,
            extracted=score.extracted,
        )
        for group, row, advantages in zip(sampled.groups, sampled.scores, sampled.advantages, strict=True)
        for completion, score, advantage in zip(group.completions, row, advantages, strict=True)
    ]


def _show_one(run: Run, sampled: Sampled) -> None:
    """debug=true: the step's first completion and what it was worth."""
    group, score = sampled.groups[0], sampled.scores[0][0]
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    run.printer.note(
        f"--- {group.prompt.question}\n{group.completions[0].text}\n--- gold {group.prompt.answer}; {parts}"
    )


def _evaluate(run: Run, parts: Parts, prompts: Sequence[Prompt], title: str) -> EvalStats:
    """Evaluates the weights that the engine holds and prints the tutorials' line."""
    cfg = parts.cfg
    total = len(prompts) * cfg.num_eval_passes

    def progress(finished: int, tokens: int) -> None:
        run.printer.sampling(title, finished, total, tokens)
        run.check_stop()

    evaluation = evaluate_prompts(
        parts.engine,
        parts.stack,
        prompts,
        setup.eval_sampling_params(cfg, parts.model.tokenizer),
        num_passes=cfg.num_eval_passes,
        mode=cfg.eval_mode,
        seed=cfg.seed,
        on_progress=progress,
        check=run.check_stop,
    )
    run.printer.note(format_eval_line(title, evaluation.stats))
    return evaluation.stats


def _finish(run: Run, before: EvalStats | None, after: EvalStats | None, seconds: float) -> Outcome:
    """summary.json and the reward curve."""
    cfg, directory = run.cfg, run.directory
    summary: dict[str, Any] = {"steps": cfg.num_batches, "seconds": seconds}
    figures = []
    if before is not None and after is not None:
        for name, attribute, scale in (
            ("accuracy", "accuracy", 0.01),
            ("format_accuracy", "format_accuracy", 0.01),
            ("mean_reward", "mean_reward", 1.0),
        ):
            values = [getattr(stats, attribute) * scale for stats in (before, after)]
            summary |= {f"{name}_before": values[0], f"{name}_after": values[1]}
            figures.append(BeforeAfter(name.replace("_", " "), values[0], values[1], percent=scale != 1.0))
        summary["eval_prompts"] = after.total

    def write() -> None:
        plot_rewards(
            read_metrics(directory.metrics),
            directory.curve,
            summary.get("accuracy_before"),
            summary.get("accuracy_after"),
            title=cfg.run_name,
        )
        write_summary(directory.summary, summary)

    processes.by_first(write)
    places = {
        **(
            {"weights": directory.checkpoints / str(cfg.num_batches) / "model_params"}
            if cfg.enable_checkpointing
            else {}
        ),
        "metrics": directory.metrics,
        "rollouts": directory.rollouts,
        "curve": directory.curve,
        "summary": directory.summary,
    }
    return Outcome(summary, figures, places)
