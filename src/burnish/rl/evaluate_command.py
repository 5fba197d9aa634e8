"""`burnish evaluate`: how good a checkpoint is on a data set."""

from typing import Any

import jax
from rich.console import Console

from burnish.config.schema import EvalConfig
from burnish.data import sources
from burnish.observe.terminal import StepPrinter
from burnish.parallel import distributed, processes
from burnish.rewards.metrics import format_eval_line, mean_pass_at_k
from burnish.rewards.stack import RewardStack
from burnish.rl import setup
from burnish.rl.evaluate import evaluate_prompts
from burnish.rl.loading import open_model


def evaluate(cfg: EvalConfig) -> dict[str, Any]:
    """Evaluate the checkpoint of the options, print the figures and return them. Raises BurnishError."""
    distributed.start()
    with distributed.others_needed():
        processes.same_options(cfg.public_dump())
        return _evaluate(cfg)


def _evaluate(cfg: EvalConfig) -> dict[str, Any]:
    model = open_model(cfg)
    setup.check_sampler(cfg, model.spec, jax.devices())
    prompts = setup.eval_prompts(cfg, model.tokenizer, sources.load_examples(setup.data_options(cfg), "eval"))
    console = Console(quiet=not processes.is_first())
    with RewardStack(setup.reward_options(cfg)) as stack, StepPrinter(1, console) as printer:
        printer.note(model.describe())
        printer.note(
            f"Evaluation: {len(prompts)} prompts × {cfg.num_eval_passes} completions, {cfg.eval_sampling_strategy}"
        )
        total = len(prompts) * cfg.num_eval_passes
        longest = max(len(prompt.token_ids) for prompt in prompts)
        slots = min(cfg.resolved_max_num_seqs, total)
        with setup.open_engine(model, cfg, jax.devices(), longest, slots, printer.note) as engine:
            engine.load_weights(setup.sampler_weights(model, cfg, jax.devices()), 0)
            evaluation = evaluate_prompts(
                engine,
                stack,
                prompts,
                setup.eval_sampling_params(cfg, model.tokenizer),
                num_passes=cfg.num_eval_passes,
                mode=cfg.eval_mode,
                seed=cfg.seed,
                on_progress=lambda finished, tokens: printer.sampling("evaluation", finished, total, tokens),
            )
        stats = evaluation.stats
        printer.note(format_eval_line(f"Evaluation ({cfg.eval_mode}, K={cfg.num_eval_passes})", stats))
        if cfg.num_eval_passes > 1:
            ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= cfg.num_eval_passes]
            figures = ", ".join(f"pass@{k}={100 * mean_pass_at_k(evaluation.scores, k):.2f}%" for k in ks)
            printer.note(f"Unbiased estimates: {figures}")
    return {
        "accuracy": stats.accuracy / 100,
        "partial_accuracy": stats.partial_accuracy / 100,
        "format_accuracy": stats.format_accuracy / 100,
        "mean_reward": stats.mean_reward,
        "corr": stats.corr,
        "total": stats.total,
    }
