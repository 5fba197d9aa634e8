"""From options to the objects of a run: data, rewards, sampling and update, one function each.

The rooms below take plain options of their own; this is the one place that knows how the command line's map to them.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from burnish.config.describe import eval_sampling
from burnish.config.groups import (
    DataOptions,
    LengthOptions,
    TagOptions,
)
from burnish.config.schema import ChatConfig, EvalConfig, RunConfig, SFTConfig
from burnish.data import sources
from burnish.data.pipeline import PromptPipeline
from burnish.data.templates import PromptTemplate
from burnish.data.tokenizer import Tokenizer
from burnish.data.types import Prompt
from burnish.errors import BurnishError
from burnish.rewards.stack import RewardOptions
from burnish.rl.loading import ModelSource, compute_dtype
from burnish.rl.losses import LossOptions
from burnish.rl.optimizer import OptimizerOptions
from burnish.rl.schedule import LearningRate, learning_rate
from burnish.rl.update import UpdateOptions
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import RolloutEngine, SamplingParams
from burnish.rollout.vllm.engine import VllmEngine, VllmOptions


def data_options(cfg: DataOptions) -> sources.DataOptions:
    return sources.DataOptions(**_shared(sources.DataOptions, cfg), hf_access_token=_token(cfg))


def reward_options(cfg: RunConfig | EvalConfig) -> RewardOptions:
    return RewardOptions(**_shared(RewardOptions, cfg))


def _shared(cls: Any, cfg: Any) -> dict[str, Any]:
    """The fields of a room's options that the command's options have under the same name."""
    names = [f.name for f in dataclasses.fields(cls) if f.name != "hf_access_token"]
    return {name: getattr(cfg, name) for name in names if hasattr(cfg, name)}


def _token(cfg: Any) -> str | None:
    return None if cfg.hf_access_token is None else cfg.hf_access_token.get_secret_value()


def tags(cfg: TagOptions) -> tuple[str, str, str, str]:
    """Reasoning start and end, answer start and end."""
    return (
        cfg.reasoning_start_token,
        cfg.reasoning_end_token,
        cfg.solution_start_token,
        cfg.solution_end_token,
    )


def template(path: str, cfg: TagOptions) -> PromptTemplate:
    return PromptTemplate.load(path, *tags(cfg))


def train_pipeline(cfg: RunConfig | SFTConfig, tokenizer: Tokenizer, examples: Sequence[Any]) -> PromptPipeline:
    """The training data of a run, in its order."""
    return PromptPipeline(
        examples,
        template(cfg.data_template_path, cfg),
        tokenizer,
        cfg.max_prefill_predict_length,
        cfg.batch_size,
        cfg.data_shuffle_seed,
        cfg.num_epoch,
        train_fraction=cfg.train_fraction,
        limit=cfg.num_batches * cfg.batch_size,
    )


def eval_prompts(
    cfg: RunConfig | SFTConfig | EvalConfig, tokenizer: Tokenizer, examples: Sequence[Any]
) -> list[Prompt]:
    """The first prompts of the evaluation split, as many as the options ask for (fewer where there are no more)."""
    batch_size = cfg.resolved_eval_batch_size
    wanted = None if cfg.num_test_batches == -1 else cfg.num_test_batches * batch_size
    if wanted == 0:
        return []
    pipeline = PromptPipeline(
        examples,
        template(cfg.data_template_path, cfg),
        tokenizer,
        cfg.max_prefill_predict_length,
        batch_size,
        cfg.data_shuffle_seed,
        shuffle=False,
        limit=wanted,
        drop_remainder=False,
    )
    prompts = [prompt for batch in pipeline for prompt in batch]
    return prompts[:wanted]


def sampling_params(cfg: RunConfig | ChatConfig, tokenizer: Tokenizer) -> SamplingParams:
    """How training rollouts and `generate` sample."""
    return SamplingParams(
        max_total_tokens=cfg.max_target_length,
        temperature=cfg.decode_sampling_temperature,
        top_k=cfg.decode_sampling_top_k,
        top_p=cfg.decode_sampling_nucleus_p,
        min_p=cfg.decode_sampling_min_p,
        stop_token_ids=tokenizer.stop_token_ids,
        stop_strings=cfg.stop_strings or (),
    )


def eval_sampling_params(cfg: RunConfig | EvalConfig, tokenizer: Tokenizer) -> SamplingParams:
    """How evaluation samples, by eval_sampling_strategy."""
    strategy = eval_sampling(cfg)
    return SamplingParams(
        max_total_tokens=cfg.max_target_length,
        temperature=strategy.temperature,
        top_k=strategy.top_k,
        top_p=strategy.top_p,
        stop_token_ids=tokenizer.stop_token_ids,
        stop_strings=cfg.stop_strings or (),
    )


def make_engine(
    source: ModelSource, lengths: LengthOptions, longest_prompt: int, max_slots: int, dtype: str
) -> BuiltinEngine:
    """A generation engine for prompts of at most `longest_prompt` tokens and sequences of the options' length."""
    return BuiltinEngine(
        source.spec,
        source.tokenizer.decode,
        max_slots=max_slots,
        max_prompt_tokens=longest_prompt,
        max_total_tokens=lengths.max_target_length,
        dtype=compute_dtype(dtype),
    )


@contextmanager
def open_engine(
    source: ModelSource,
    cfg: RunConfig | EvalConfig,
    longest_prompt: int,
    max_slots: int,
    note: Callable[[str], None],
) -> Iterator[RolloutEngine]:
    """The engine that rollout_engine names; it ends with the context. `note` is told what the user should know."""
    if cfg.rollout_engine == "builtin":
        yield make_engine(source, cfg, longest_prompt, max_slots, cfg.dtype)
        return
    if jax.process_count() > 1:
        raise BurnishError(
            "rollout_engine=vllm: weights go to vLLM from one process, and this run has several; use "
            "rollout_engine=builtin"
        )
    options = VllmOptions(
        python=cfg.vllm_python,
        timeout=cfg.resolved_rollout_timeout,
        restarts=cfg.resolved_rollout_restarts,
        chunk_size=cfg.rl.reshard_chunk_size if isinstance(cfg, RunConfig) else None,
        tensor_parallelism=_vllm_tensor_parallelism(cfg) if isinstance(cfg, RunConfig) else 1,
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        memory_fraction=cfg.hbm_utilization_vllm,
        async_scheduling=cfg.async_scheduling,
        enable_prefix_caching=cfg.resolved_enable_prefix_caching,
        hf_overrides=cfg.vllm_hf_overrides,
        additional_config=cfg.vllm_additional_config,
    )
    with source.snapshot() as directory:
        engine = VllmEngine(
            source.spec,
            directory,
            source.tokenizer.decode,
            options,
            max_slots=max_slots,
            max_prompt_tokens=longest_prompt,
            max_total_tokens=cfg.max_target_length,
            dtype=compute_dtype(cfg.dtype),
            note=note,
        )
        with closing(engine):
            yield engine


def _vllm_tensor_parallelism(cfg: RunConfig) -> int:
    """rollout_tensor_parallelism for vLLM, whose other axes are refused with the reason."""
    for name in ("rollout_data_parallelism", "rollout_expert_parallelism"):
        if (value := getattr(cfg, name)) not in (1, -1):
            raise BurnishError(
                f"{name}={value}: rollout_engine=vllm runs one replica of the model, split by "
                "rollout_tensor_parallelism alone; give 1, or rollout_engine=builtin"
            )
    if cfg.rollout_tensor_parallelism == -1:
        return jax.device_count()
    return cfg.rollout_tensor_parallelism


def schedule(cfg: RunConfig | SFTConfig) -> LearningRate:
    return learning_rate(
        cfg.learning_rate, cfg.warmup_steps_fraction, cfg.num_updates, cfg.learning_rate_schedule_steps
    )


def update_options(cfg: RunConfig | SFTConfig) -> UpdateOptions:
    """Loss, optimizer and numerics of the update."""
    if isinstance(cfg, RunConfig):
        loss = LossOptions(
            algorithm=cfg.rl.loss_algo,
            aggregation=cfg.rl.loss_agg_mode,
            epsilon_low=cfg.rl.grpo_epsilon,
            epsilon_high=cfg.rl.resolved_epsilon_high,
            beta=cfg.rl.grpo_beta,
        )
        temperature = cfg.decode_sampling_temperature
    else:
        loss, temperature = LossOptions(algorithm="cross-entropy", aggregation="token-mean"), 1.0
    return UpdateOptions(
        loss=loss,
        optimizer=OptimizerOptions(
            learning_rate=schedule(cfg),
            kind=cfg.optimizer,
            b1=cfg.adam_b1,
            b2=cfg.adam_b2,
            eps=cfg.adam_eps,
            weight_decay=cfg.adam_weight_decay,
            clip=cfg.gradient_clipping_threshold,
            mu_dtype=jnp.dtype(cfg.mu_dtype),
            seed=cfg.seed,
        ),
        temperature=temperature,
        dtype=compute_dtype(cfg.dtype),
        grad_dtype=jnp.dtype(cfg.grad_dtype),
        remat=cfg.remat_policy,
    )


ROW_TOKENS = 2048
"""Tokens of a training row: matrix products have long reached their full rate, and activations stay bounded however
many prompts a micro-batch has."""


def row_tokens(cfg: LengthOptions) -> int:
    """Most tokens in a training row; a longer prompt with one completion still gets a row."""
    return max(ROW_TOKENS, cfg.max_target_length)


def completion_seeds(
    seed: int, purpose: str, step: int, prompts: Sequence[Prompt], num_completions: int
) -> list[list[int]]:
    """One 32-bit seed per completion, a function of the run's seed, what it is for, the step, the prompt's row in
    its data set and the completion's number: not of batch composition, and the same after a resume."""

    def one(prompt: Prompt, i: int) -> int:
        digest = hashlib.blake2b(f"{seed} {purpose} {step} {prompt.index} {i}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little")

    return [[one(prompt, i) for i in range(num_completions)] for prompt in prompts]
