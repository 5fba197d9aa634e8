"""What a step of a run works on: how many prompts, rows, slots and columns, by the code that training itself uses.

Rows are packed by rl/packing and slots placed by rollout/schedule, from made-up prompts and completions of the
lengths that are expected; nothing of the run's data is read.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from burnish.config.schema import PlanConfig
from burnish.data.types import Prompt
from burnish.models.params import param_infos
from burnish.models.spec import ModelSpec
from burnish.rl.packing import pack
from burnish.rl.types import Denominators, PackedBatch
from burnish.rollout import engine
from burnish.rollout.decode import CHUNK
from burnish.rollout.schedule import Schedule, bucket
from burnish.rollout.types import Completion, Group, StopReason


@dataclass(frozen=True)
class Workload:
    """Sizes of one step and of the run."""

    prompt_tokens: int
    completion_tokens: int
    prompts: int
    completions: int  # per prompt
    steps: int
    iterations: int  # updates per step
    reference: bool  # whether the reference model scores every step
    recomputes: bool  # whether the backward pass runs the layers' forward pass again
    off_policy: bool  # whether sampling goes on while weights are updated
    num_leaves: int  # arrays of the model

    micro_batches: int
    rows: int  # of a micro-batch
    row_length: int
    row_tokens: int  # of all micro-batches, without padding
    trained_tokens: int

    slots: int
    lanes: int
    lane_columns: int
    first_columns: int  # of a row's own cache at first
    own_columns: int  # and when it is fullest
    prefill_prompts: int  # of one call
    prefill_columns: int
    prefill_calls: int
    decode_steps: int
    decode_calls: int
    eval_completions: int

    @property
    def prefill_tokens(self) -> int:
        """Of one call."""
        return self.prefill_prompts * self.prefill_columns

    @property
    def logprob_chunks(self) -> int:
        """Turns of the loop over the vocabulary projection in one micro-batch."""
        from burnish.rl.logprobs import CHUNK_TOKENS

        width = min(CHUNK_TOKENS, self.row_length)  # each device has one row
        used = -(-self.trained_tokens // (self.rows * self.micro_batches))
        return max(1, -(-used // width))


def workload(cfg: PlanConfig, spec: ModelSpec, row_shards: int, slot_shards: int, *, longest: bool = False) -> Workload:
    """The sizes of a run whose trainer splits rows over `row_shards` devices and whose sampler splits slots over
    `slot_shards`. `longest`: of the longest prompts and completions that can come, for the memory they need."""
    prompt = cfg.max_prefill_predict_length if longest else cfg.resolved_prompt_tokens
    completion = cfg.max_target_length - prompt if longest else cfg.resolved_completion_tokens
    P, G = cfg.batch_size, cfg.rl.num_generations
    packed = packed_rows(cfg, prompt, completion, row_shards)
    shape = packed.batch.tokens.shape
    rollout = cfg.resolved_rollout_micro_batch_size
    slots = min(cfg.resolved_max_num_seqs, rollout * G)
    schedule = Schedule([G] * rollout, slots, slot_shards)
    rows = len(schedule.slots)
    waves = P // rollout * math.ceil(rollout * G / rows)
    columns = first_columns = min(engine.FIRST_COLUMNS, bucket(completion, 16))
    while columns < completion:
        columns *= 2
    prefill_columns = bucket(max(1, prompt - 1), 32, halves=True)
    full = max(1, engine.PREFILL_TOKENS // prefill_columns)
    # As the engine does: each shard prefills the prompts of its own lanes.
    of_shard = -(-min(schedule.num_lanes, rollout) // slot_shards)
    at_once = slot_shards * (full if 2 * of_shard >= full else 1)
    return Workload(
        prompt_tokens=prompt,
        completion_tokens=completion,
        prompts=P,
        completions=G,
        steps=cfg.num_batches,
        iterations=cfg.rl.num_iterations,
        reference=cfg.rl.grpo_beta > 0,
        recomputes=cfg.remat_policy == "full",
        off_policy=cfg.rl.off_policy_steps > 0,
        num_leaves=_num_leaves(spec),
        micro_batches=packed.micro_batches,
        rows=shape[0],
        row_length=shape[1],
        row_tokens=packed.tokens,
        trained_tokens=P * G * completion,
        slots=rows,
        lanes=schedule.num_lanes,
        lane_columns=bucket(cfg.max_prefill_predict_length - 1, 32, halves=True),
        first_columns=first_columns,
        own_columns=columns,
        prefill_prompts=at_once,
        prefill_columns=prefill_columns,
        prefill_calls=math.ceil(P / at_once),
        decode_steps=waves * completion,
        decode_calls=waves * math.ceil(completion / CHUNK),
        eval_completions=cfg.num_test_batches * cfg.resolved_eval_batch_size * cfg.num_eval_passes
        if cfg.num_test_batches > 0
        else 0,
    )


@dataclass(frozen=True)
class Rows:
    """The rows of a step."""

    batch: PackedBatch  # the first micro-batch
    denominators: Denominators
    micro_batches: int
    tokens: int  # of all micro-batches, without padding


def packed_rows(cfg: PlanConfig, prompt: int, completion: int, row_shards: int) -> Rows:
    """A step's rows as training packs them, from prompts and completions of these lengths."""
    return _packed(
        cfg.batch_size,
        cfg.rl.num_generations,
        prompt,
        completion,
        max_tokens=cfg.train_row_tokens,
        max_groups=cfg.resolved_train_micro_batch_size,
        rows=row_shards,
    )


@lru_cache(maxsize=64)
def _packed(P: int, G: int, prompt: int, completion: int, *, max_tokens: int, max_groups: int, rows: int) -> Rows:
    made_up = Completion(
        token_ids=np.zeros(completion, np.int32),
        logprobs=np.zeros(completion, np.float32),
        weight_versions=np.zeros(completion, np.int32),
        stop_reason=StopReason.LENGTH,
        text="",
        seed=0,
    )
    group = Group(Prompt(index=0, question="", answer="", text="", token_ids=(0,) * prompt), (made_up,) * G)
    packed = pack(
        [group] * P,
        np.ones((P, G)),
        np.ones((P, G), bool),
        max_tokens=max_tokens,
        max_groups=max_groups,
        rows=rows,
        keep_zero_advantages=True,
    )
    return Rows(
        batch=packed.micro_batches[0],
        denominators=packed.denominators,
        micro_batches=len(packed.micro_batches),
        tokens=packed.row_tokens,
    )


def _num_leaves(spec: ModelSpec) -> int:
    import jax

    return len(jax.tree.leaves(param_infos(spec), is_leaf=lambda x: hasattr(x, "axes")))
