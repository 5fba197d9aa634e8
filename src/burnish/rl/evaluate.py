"""Evaluation: sample K completions of each prompt, score them, count. The same before, after and without training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from burnish.data.types import Prompt
from burnish.parallel import processes
from burnish.rewards.metrics import EvalMode, EvalStats, evaluation_stats
from burnish.rewards.stack import RewardStack
from burnish.rewards.types import RewardItem, Score
from burnish.rl.setup import completion_seeds
from burnish.rollout.types import Group, RolloutEngine, SamplingParams


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: the figures, and the completions with their scores behind them."""

    stats: EvalStats
    groups: list[Group]
    scores: list[list[Score]]


def evaluate_prompts(
    engine: RolloutEngine,
    stack: RewardStack,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    num_passes: int,
    mode: EvalMode,
    seed: int,
    on_progress: Callable[[int, int], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Evaluation:
    """K = `num_passes` completions of every prompt with the weights that the engine holds. Every prompt counts.
    `on_progress` is the engine's, `check` is that of `score_groups`."""
    seeds = completion_seeds(seed, "evaluation", 0, prompts, num_passes)
    groups = engine.generate(prompts, seeds, sampling, on_progress)
    scores = score_groups(stack, groups, check)
    return Evaluation(evaluation_stats(scores, mode), groups, scores)


def score_groups(
    stack: RewardStack, groups: Sequence[Group], check: Callable[[], None] | None = None
) -> list[list[Score]]:
    """One Score per completion, in the shape of the groups. Each process scores its share of the groups; all of them
    get every score. `check` is called by all of them again and again while one is still scoring, and ends all
    scoring by raising."""
    own = groups[jax.process_index() :: jax.process_count()]
    shares = processes.gather(processes.together_while(lambda on_wait: _score_own(stack, own, on_wait), check))
    return [shares[i % len(shares)][i // len(shares)] for i in range(len(groups))]


def _score_own(stack: RewardStack, groups: Sequence[Group], on_wait: Callable[[], None] | None) -> list[list[Score]]:
    items = [
        RewardItem(group.prompt.text, completion.text, group.prompt.question, group.prompt.answer)
        for group in groups
        for completion in group.completions
    ]
    scores = iter(stack.score(items, on_wait=on_wait) if items else [])
    return [[next(scores) for _ in group.completions] for group in groups]
