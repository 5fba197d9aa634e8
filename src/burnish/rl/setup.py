"""From options to the objects of a run: data, rewards, sampling and update, one function each.

The rooms below take plain options of their own; this is the one place that knows how the command line's map to them.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from burnish.checkpoints.hf_export import write_json
from burnish.checkpoints.hf_import import read_config
from burnish.checkpoints.preemption import unwinding_on_signals
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
from burnish.models.families import spec_from_hf, text_only_config
from burnish.models.params import Params, param_shardings
from burnish.models.spec import ModelSpec
from burnish.observe.files import is_local
from burnish.rewards.stack import RewardOptions
from burnish.rl.devices import check_model, sampler_mesh, sampler_sizes
from burnish.rl.loading import ModelSource, compute_dtype
from burnish.rl.losses import LossOptions
from burnish.rl.optimizer import OptimizerOptions
from burnish.rl.schedule import LearningRate, learning_rate
from burnish.rl.update import UpdateOptions
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import RolloutEngine, SamplingParams
from burnish.rollout.vllm.engine import VllmEngine, VllmOptions, check_sampling


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
    source: ModelSource,
    lengths: LengthOptions,
    longest_prompt: int,
    max_slots: int,
    dtype: str,
    mesh: Mesh | None = None,
    reshard_chunk_size: int | None = None,
) -> BuiltinEngine:
    """A generation engine for prompts of at most `longest_prompt` tokens and sequences of the options' length, by
    default on one device."""
    return BuiltinEngine(
        source.spec,
        source.tokenizer.decode,
        max_slots=max_slots,
        max_prompt_tokens=longest_prompt,
        max_total_tokens=lengths.max_target_length,
        dtype=compute_dtype(dtype),
        mesh=mesh,
        reshard_chunk_size=reshard_chunk_size,
    )


def check_sampler(cfg: RunConfig | EvalConfig, spec: ModelSpec, devices: Sequence[jax.Device]) -> None:
    """Raises BurnishError where the engine of the options can not sample this model on these devices: for the start of
    a command, before weights are read."""
    sizes = sampler_sizes(cfg, devices)
    if cfg.rollout_engine == "builtin":
        check_model(spec, sizes)
        return
    if jax.process_count() > 1:
        raise BurnishError(
            "rollout_engine=vllm: weights go to vLLM from one process, and this run has several; use "
            "rollout_engine=builtin"
        )
    for axis in ("data", "expert"):
        if (size := getattr(sizes, axis)) > 1:
            raise BurnishError(
                f"{sizes.option(axis)}={size}: rollout_engine=vllm runs one copy of the model, split by "
                f"rollout_tensor_parallelism alone; give rollout_tensor_parallelism={len(devices)} and 1 for the other "
                "two, or rollout_engine=builtin"
            )


@contextmanager
def open_engine(
    source: ModelSource,
    cfg: RunConfig | EvalConfig,
    devices: Sequence[jax.Device],
    longest_prompt: int,
    max_slots: int,
    note: Callable[[str], None],
    on_wait: Callable[[], None] | None = None,
    log: epath.Path | None = None,
) -> Iterator[RolloutEngine]:
    """The engine that rollout_engine names, on these devices; it ends with the context, and vLLM's process also where a
    signal ends this one. `note` is told what the user should know; `on_wait` is called twice a second while vLLM starts
    or takes weights; what it prints is added to `log`, if that is a file on this machine."""
    chunk_size = cfg.rl.reshard_chunk_size if isinstance(cfg, RunConfig) else None
    if cfg.rollout_engine == "builtin":
        mesh = sampler_mesh(cfg, devices)
        yield make_engine(source, cfg, longest_prompt, max_slots, cfg.dtype, mesh, chunk_size)
        return
    check_sampling(eval_sampling_params(cfg, source.tokenizer))
    if isinstance(cfg, RunConfig):
        check_sampling(sampling_params(cfg, source.tokenizer))
    options = VllmOptions(
        python=cfg.vllm_python,
        timeout=cfg.resolved_rollout_timeout,
        restarts=cfg.resolved_rollout_restarts,
        chunk_size=chunk_size,
        tensor_parallelism=sampler_sizes(cfg, devices).tensor,
        cuda_devices=cuda_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES")),
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        memory_fraction=cfg.hbm_utilization_vllm,
        async_scheduling=cfg.async_scheduling,
        enable_prefix_caching=cfg.resolved_enable_prefix_caching,
        hf_overrides=cfg.vllm_hf_overrides,
        additional_config=cfg.vllm_additional_config,
    )
    with unwinding_on_signals(), source.snapshot() as directory:
        # What is trained is text: vLLM makes no vision tower.
        config = text_only_config(read_config(directory))
        write_json(directory / "config.json", config)
        engine = VllmEngine(
            spec_from_hf(config),
            directory,
            source.tokenizer.decode,
            options,
            max_slots=max_slots,
            max_prompt_tokens=longest_prompt,
            max_total_tokens=cfg.max_target_length,
            dtype=compute_dtype(cfg.dtype),
            log=Path(log) if log is not None and is_local(log) else None,
            note=note,
            on_wait=on_wait,
        )
        with closing(engine):
            yield engine


def cuda_devices(devices: Sequence[jax.Device], visible: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of a process that has just these devices of ours, which has the value `visible` itself;
    None where they are no GPUs."""
    if devices[0].platform != "gpu":
        return None
    numbers = [device.local_hardware_id for device in devices]
    names = visible.split(",") if visible else [str(i) for i in range(max(numbers) + 1)]
    return ",".join(names[i] for i in numbers)


def sampler_weights(source: ModelSource, cfg: EvalConfig, devices: Sequence[jax.Device]) -> Params:
    """The model's weights in the type they are computed with (nothing is trained), where the engine of the options
    takes them: on the sampler's devices, or in this process's memory for vLLM."""
    dtype = jnp.dtype(compute_dtype(cfg.dtype)).name
    if cfg.rollout_engine == "vllm":
        return source.load(dtype)
    return source.load(dtype, shardings=param_shardings(source.spec, sampler_mesh(cfg, devices)))


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
            importance_cap=cfg.rl.importance_weight_cap if cfg.rl.off_policy_steps else None,
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


def completion_seeds(
    seed: int, purpose: str, step: int, prompts: Sequence[Prompt], num_completions: int
) -> list[list[int]]:
    """One 32-bit seed per completion, a function of the run's seed, what it is for, the step, the prompt's row in
    its data set and the completion's number: not of batch composition, and the same after a resume."""

    def one(prompt: Prompt, i: int) -> int:
        digest = hashlib.blake2b(f"{seed} {purpose} {step} {prompt.index} {i}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little")

    return [[one(prompt, i) for i in range(num_completions)] for prompt in prompts]
