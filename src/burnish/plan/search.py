"""Looks for the nearest settings of a run that fit its devices.

Every combination of micro-batch, row length, recomputation, optimizer, meshes and slots has a distance from what was
asked for, and bytes that can be reckoned at once: all but the temporaries exactly, those roughly. The nearest ones that
should fit are compiled, one after the other, until one does or the time is up.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from pydantic import ValidationError

from burnish.config.schema import PlanConfig
from burnish.errors import BurnishError
from burnish.models.params import layer_infos
from burnish.models.spec import ModelSpec
from burnish.parallel import rules
from burnish.plan.chips import Topology
from burnish.plan.make import GRADIENTS, OPTIMIZER, REFERENCE, VIEW, WEIGHTS, Setting, make_plan, memory_moments
from burnish.plan.result import Memory, Moment, Plan, Program
from burnish.rl.logprobs import CHUNK_TOKENS, KEEP_BYTES

MOST_COMPILED = 24
"""Candidates that are compiled at most."""

_PASSING = ("train_micro_batch_size", "train_row_tokens", "remat_policy", "max_num_seqs")
_LASTING = (WEIGHTS, OPTIMIZER, GRADIENTS, REFERENCE, VIEW)


@dataclass(frozen=True)
class Tried:
    """One setting that was compiled."""

    changes: dict[str, Any]
    fits: bool
    verdict: str


@dataclass(frozen=True)
class Search:
    """What was found: the first plan that fits, and all that was tried."""

    found: Plan | None
    changes: dict[str, Any]
    tried: tuple[Tried, ...]
    considered: int  # settings whose bytes were reckoned
    out_of_time: bool


@dataclass(frozen=True)
class _Choice:
    """Options that change together, and how far that is from what was asked for."""

    options: dict[str, Any]
    distance: float


def search(
    cfg: PlanConfig,
    spec: ModelSpec,
    topology: Topology,
    devices: Sequence[jax.Device],
    progress: Callable[[str], None] = lambda text: None,
) -> Search:
    """The nearest settings that fit. Takes search_seconds at most, but for the compilation that is under way then."""
    end = time.monotonic() + cfg.search_seconds
    limit = topology.chip.memory
    assert limit is not None
    candidates: list[tuple[float, dict[str, Any], Setting]] = []
    considered = 0
    hopeless: set[tuple[tuple[str, Any], ...]] = set()
    for distance, changes in _combinations(cfg, topology):
        if time.monotonic() > end:
            break
        # What is held whatever the micro-batch, rows, recomputation and slots.
        lasting = tuple((name, value) for name, value in changes.items() if name not in _PASSING)
        if lasting in hopeless:
            continue
        setting = _setting(cfg, changes, spec, topology, devices)
        if setting is None:
            continue
        considered += 1
        if considered % 50 == 0:
            progress(f"search: {considered} settings reckoned")
        moments = reckoned(setting)
        if _lasting(moments) > limit:
            hopeless.add(lasting)
        elif max(m.total for m in moments) <= limit:
            candidates.append((distance, changes, setting))
            if len(candidates) >= MOST_COMPILED:
                break
    tried: list[Tried] = []
    for _, changes, setting in candidates:
        if time.monotonic() > end:
            return Search(None, {}, tuple(tried), considered, True)
        progress(f"search: compiling {words(changes)}")
        plan = make_plan(setting, exact=cfg.exact, stop_early=True)
        tried.append(Tried(changes, bool(plan.fits), plan.verdict()))
        if plan.fits:
            return Search(plan, changes, tuple(tried), considered, False)
    return Search(None, {}, tuple(tried), considered, time.monotonic() > end)


def _lasting(moments: Sequence[Moment]) -> int:
    """Bytes that are there whatever the micro-batch, recomputation and slots: the trainer has one gradient at least."""
    return max(sum(m.kinds.get(k, 0) for k in _LASTING if k != GRADIENTS or m.name == "optimizer") for m in moments)


def words(changes: dict[str, Any]) -> str:
    """As one would type them."""
    return " ".join(f"{name}={value}" for name, value in changes.items())


def _setting(
    cfg: PlanConfig, changes: dict[str, Any], spec: ModelSpec, topology: Topology, devices: Sequence[jax.Device]
) -> Setting | None:
    """The run with these options; None where they contradict one another or the model can not be split so."""
    try:
        changed = type(cfg).model_validate(cfg.model_dump() | changes)
        return Setting.of(changed, spec, topology, devices)
    except (ValidationError, BurnishError):
        return None


def _combinations(cfg: PlanConfig, topology: Topology) -> Iterator[tuple[float, dict[str, Any]]]:
    """All combinations of changes, the nearest first."""
    choices = [
        _micro_batches(cfg),
        _row_lengths(cfg),
        _remats(cfg),
        _optimizers(cfg),
        _slots(cfg),
        _trainer_meshes(cfg, topology),
    ]
    every = [
        (sum(c.distance for c in combination), {k: v for c in combination for k, v in c.options.items()})
        for combination in itertools.product(*choices)
    ]
    every.sort(key=lambda item: item[0])
    return ((distance, changes) for distance, changes in every if changes)


def _micro_batches(cfg: PlanConfig) -> list[_Choice]:
    """Smaller micro-batches cost time only where they leave a chip without work."""
    now = cfg.resolved_train_micro_batch_size
    smaller = [n for n in range(now - 1, 0, -1) if cfg.batch_size % n == 0]
    return [_Choice({}, 0), *(_Choice({"train_micro_batch_size": n}, 1 + 0.1 * i) for i, n in enumerate(smaller))]


def _row_lengths(cfg: PlanConfig) -> list[_Choice]:
    """Shorter rows need less for activations and send more; so long ones that all fit one micro-batch need no room for
    a sum of gradients beside the new ones. Beyond the longest sequence and all of a step nothing changes."""
    now = cfg.train_row_tokens
    step = cfg.batch_size * cfg.rl.num_generations * cfg.max_target_length
    shorter = [now // n for n in (2, 4) if now // n >= cfg.max_target_length]
    longer = [now * n for n in (2, 4) if now * n < 2 * step]
    return [
        _Choice({}, 0),
        *(_Choice({"train_row_tokens": n}, 0.9 + 0.1 * i) for i, n in enumerate(shorter)),
        *(_Choice({"train_row_tokens": n}, 0.8 + 0.1 * i) for i, n in enumerate(longer)),
    ]


def _remats(cfg: PlanConfig) -> list[_Choice]:
    order = ["none", "minimal", "full"]
    later = order[order.index(cfg.remat_policy) + 1 :]
    return [_Choice({}, 0), *(_Choice({"remat_policy": p}, 1.5 + 0.1 * i) for i, p in enumerate(later))]


def _optimizers(cfg: PlanConfig) -> list[_Choice]:
    """Other optimizers and smaller types change what is computed, so they are far."""
    choices = [_Choice({}, 0)]
    if cfg.optimizer == "adamw" and cfg.mu_dtype == "float32":
        choices.append(_Choice({"mu_dtype": "bfloat16"}, 3))
    if cfg.grad_dtype == "float32":
        choices.append(_Choice({"grad_dtype": "bfloat16"}, 3.2))
    if cfg.optimizer == "adamw":
        choices.append(_Choice({"optimizer": "adafactor"}, 5))
        if cfg.grad_dtype == "float32":
            choices.append(_Choice({"optimizer": "adafactor", "grad_dtype": "bfloat16"}, 7))
    return choices


def _slots(cfg: PlanConfig) -> list[_Choice]:
    """Fewer completions at the same time take longer to sample."""
    choices, slots = [_Choice({}, 0)], cfg.resolved_max_num_seqs
    while slots > 1 and len(choices) < 5:
        slots //= 2
        choices.append(_Choice({"max_num_seqs": slots}, 1.2 + 0.3 * len(choices)))
    return choices


def _trainer_meshes(cfg: PlanConfig, topology: Topology) -> list[_Choice]:
    """Other splits of the trainer's devices, and a sampler split over all of its own by tensor."""
    count = round(topology.num_devices / topology.num_slices * cfg.trainer_devices_fraction)
    choices = [_Choice({}, 0)]
    for sizes in itertools.product(*[[n for n in range(1, count + 1) if count % n == 0]] * 3):
        data, expert, tensor = sizes
        if count % (data * expert * tensor):
            continue
        options = {
            "ici_data_parallelism": data,
            "ici_fsdp_parallelism": count // (data * expert * tensor),
            "ici_expert_parallelism": expert,
            "ici_tensor_parallelism": tensor,
        }
        # Copies of the weights and many parts of small matrices are what one would rather not have.
        choices.append(_Choice(options, 2 + 0.5 * (data > 1) + 0.1 * tensor + 0.1 * expert))
    sampling = round(topology.num_devices * cfg.sampler_devices_fraction)
    tensors = [n for n in range(1, sampling + 1) if sampling % n == 0 and n != cfg.rollout_tensor_parallelism]
    for n in tensors:
        options = {"rollout_tensor_parallelism": n, "rollout_data_parallelism": -1, "rollout_expert_parallelism": 1}
        choices.append(_Choice(options, 1.5 + 0.1 * n))
    return choices


def reckoned(setting: Setting) -> list[Moment]:
    """What one device holds at every moment, with temporaries by rule of thumb."""
    programs = [
        Program(job.name, job.side, job.per_step, _reckoned_memory(setting, job.name), (), 0.0)
        for job in setting.jobs()
    ]
    return memory_moments(setting, programs)


def _reckoned_memory(setting: Setting, program: str) -> Memory:
    temporaries = 0
    if program in ("gradients", "reference logprobs"):
        temporaries = _training_temporaries(setting, backward=program == "gradients")
    elif program == "decode":
        sampler = setting.sampler
        rows = setting.longest.slots / rules.ways("batch", sampler.mesh.shape)
        temporaries = int(rows * setting.spec.vocab_size * 4 * 2)
    return Memory(arguments=0, outputs=0, aliased=0, temporaries=temporaries, code=0)


def _training_temporaries(setting: Setting, *, backward: bool) -> int:
    """What the forward and backward pass hold besides weights: results that are kept for the backward pass, one layer
    at work with its gathered weights, and logits."""
    spec, w, mesh = setting.spec, setting.longest, setting.trainer.updater.mesh.shape
    tensor, split = mesh["tensor"], mesh["tensor"] * mesh["expert"]
    tokens = w.rows * w.row_length / rules.ways("batch", mesh)
    item = 4 if setting.cfg.dtype == "float32" else 2
    kind = spec.at(0)
    infos = layer_infos(kind)
    weights = sum(i.size for i in infos.values()) / split * item * 2  # this layer's and the next one's
    heads = (kind.num_heads + 2 * kind.num_kv_heads) * kind.head_dim / tensor
    width = spec.d_mlp / tensor * 2
    if spec.experts:
        width += 2 * spec.experts.d_expert * spec.experts.num_active / tensor
    products = tokens * (heads + width + 2 * spec.d_model) * item
    kept = 0.0
    if backward:
        per_layer = {"full": 0.0, "minimal": products, "none": 3 * products}[setting.cfg.remat_policy]
        kept = spec.num_layers * (tokens * spec.d_model * item + per_layer)
    masks = 0 if setting.topology.chip.platform == "tpu" else tokens * w.row_length  # kernels make them as they go
    at_work = 3 * products + masks
    logits = min(tokens, CHUNK_TOKENS) * spec.vocab_size / tensor * 4 * 3
    if backward:
        all_logits = tokens * spec.vocab_size / tensor * 4
        logits += min(all_logits, KEEP_BYTES) + spec.vocab_size * spec.d_model / tensor * 4
        weights *= 2
    return int(kept + at_work + logits + weights)
