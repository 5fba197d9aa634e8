"""The programs of a step, compiled for devices that are not there.

They are the very functions that training runs (the Updater's, and those of rollout/decode), lowered with shapes and
shardings in place of arrays, so that nothing is allocated, and compiled by the target's own compiler.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from burnish.config.schema import PlanConfig
from burnish.models.params import ParamInfo, Params, layer_infos, layer_place, param_infos, param_shardings
from burnish.models.spec import ModelSpec
from burnish.parallel import rules, transfer
from burnish.parallel.mesh import on
from burnish.plan import gpu
from burnish.plan.chips import Topology
from burnish.plan.hlo import collectives
from burnish.plan.result import Memory, Program, Side
from burnish.plan.workload import Workload, packed_rows
from burnish.rl import setup
from burnish.rl.loading import compute_dtype
from burnish.rl.optimizer import TrainState
from burnish.rl.types import Denominators, PackedBatch
from burnish.rl.update import Updater
from burnish.rollout import decode
from burnish.rollout.sampling import Cuts, Way, cuts_from
from burnish.rollout.types import SamplingParams


def devices_of(topology: Topology) -> list[jax.Device]:
    """The devices of a topology, as the compiler knows them. Raises PlanError where there is no compiler for it."""
    from burnish.plan.errors import PlanError

    if topology.chip.platform == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < topology.num_devices:
            raise PlanError(
                f"topology=cpu-{topology.num_devices}: this process has {len(devices)} virtual devices already; set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.num_devices}"
            )
        return devices[: topology.num_devices]
    if topology.chip.platform == "gpu":
        return gpu.devices_of(topology)
    from jax.experimental.topologies import get_topology_desc

    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise PlanError(
            "planning for TPUs needs their compiler, which is not installed (and needs no TPU): "
            "pip install 'burnish[tpu]'"
        ) from None
    try:
        description = get_topology_desc(
            platform="tpu",
            topology_name=topology.name,
            chips_per_host_bounds=topology.chips_per_host,
            num_slices=topology.num_slices,
        )
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise PlanError(f"topology={topology.name}: the TPU compiler refuses it: {reason}") from error
    return list(description.devices)


@dataclass(frozen=True)
class Job:
    """A program to be compiled: its abstract arguments are bound already."""

    name: str
    side: Side
    per_step: float
    mesh: Mesh
    lower: Callable[[], Any]  # -> jax.stages.Lowered
    unknown_trips: Callable[[int], float] = lambda depth: 1.0


def compile_job(job: Job) -> Program:
    """Compile one program; one that is too large for the device becomes a Program with a failure."""
    start = time.perf_counter()
    program = Program(job.name, job.side, job.per_step, None, (), 0.0)
    try:
        with on(job.mesh):
            compiled = job.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        failure = out_of_memory(str(error))
        if failure is None:
            raise
        return replace(program, failure=failure, seconds=time.perf_counter() - start)
    stats = compiled.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
    found = collectives(compiled.as_text(), dict(job.mesh.shape), job.unknown_trips)
    return replace(program, memory=memory, collectives=tuple(found), seconds=time.perf_counter() - start)


def out_of_memory(message: str) -> str | None:
    """What the compiler says of a program that is larger than the device, shortened; None for any other message."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    used = re.search(r"[Uu]sed ([\d.]+[KMGT]) of ([\d.]+[KMGT])", message)
    temporaries = re.search(r"required for HLO temporaries \(([\d.]+[KMGT])\)", message)
    if used:
        return f"needs {used[1]}iB, more than the {used[2]}iB that a program may use"
    if temporaries:
        return f"needs {temporaries[1]}iB for temporaries alone, more than a device has"
    return message.splitlines()[0][:200]


def _is_info(x: Any) -> bool:
    return isinstance(x, ParamInfo)


def abstract_params(spec: ModelSpec, mesh: Mesh, dtype: Any) -> Params:
    """The tree of parameters with shapes, a dtype and where each part is."""
    return jax.tree.map(
        lambda info, sharding: jax.ShapeDtypeStruct(info.shape, dtype, sharding=sharding),
        param_infos(spec),
        param_shardings(spec, mesh),
        is_leaf=_is_info,
    )


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def device_bytes(tree: Any) -> int:
    """Bytes of one device's part of abstract arrays."""

    def one(x: Any) -> int:
        sharding = x.sharding
        shape = sharding.shard_shape(x.shape) if isinstance(sharding, NamedSharding) else x.shape
        return int(np.prod(shape, dtype=np.int64)) * x.dtype.itemsize

    return sum(one(x) for x in jax.tree.leaves(tree))


@dataclass(frozen=True)
class Trainer:
    """The trainer's side: the Updater of the run, and its state without arrays."""

    updater: Updater
    state: TrainState
    grads: Params
    batch: PackedBatch
    denominators: Denominators
    micro_batches: int

    @staticmethod
    def of(cfg: PlanConfig, spec: ModelSpec, mesh: Mesh) -> "Trainer":
        """Raises MeshError where the model can not be split as the mesh says."""
        updater = Updater(spec, setup.update_options(cfg), mesh)
        params = abstract_params(spec, mesh, jnp.dtype(cfg.weight_dtype))
        state = jax.eval_shape(lambda p: _fresh_state(updater, p), params)
        longest = cfg.max_target_length - cfg.max_prefill_predict_length
        packed = packed_rows(cfg, cfg.max_prefill_predict_length, longest, updater.rows)
        batch = packed.batch
        if cfg.rl.grpo_beta or cfg.rl.num_iterations > 1:
            numbers: Any = np.zeros(batch.tokens.shape, np.float32)
            batch = replace(
                batch,
                old_logprobs=numbers if cfg.rl.num_iterations > 1 else None,
                reference_logprobs=numbers if cfg.rl.grpo_beta else None,
            )

        def abstract(x: Any) -> jax.ShapeDtypeStruct:
            x = np.asarray(x)
            axes = ("batch",) if x.ndim else ()
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rules.sharding(axes, x.shape, mesh))

        return Trainer(
            updater=updater,
            state=_placed(state, updater.state_shardings),
            grads=updater.gradient_shapes(params),
            batch=jax.tree.map(abstract, batch),
            denominators=packed.denominators,
            micro_batches=packed.micro_batches,
        )

    def jobs(self, side: Side, w: Workload) -> list[Job]:
        """gradients, optimizer and, with a KL penalty, reference logprobs."""
        u, mesh = self.updater, self.updater.mesh

        def unknown(depth: int) -> float:
            # The vocabulary projection by chunks; within layers, the visible key blocks of attention: half of a row's.
            return w.logprob_chunks if depth == 0 else max(1, w.row_length // 256)

        gradients = lambda: u._gradients.lower(self.state.params, self.batch, self.denominators)  # noqa: E731
        apply = lambda: u._apply.lower(self.state, self.grads)  # noqa: E731
        jobs = [
            Job("gradients", side, w.micro_batches * w.iterations, mesh, gradients, unknown),
            Job("optimizer", side, w.iterations, mesh, apply),
        ]
        if w.reference:
            plain = replace(self.batch, old_logprobs=None, reference_logprobs=None)
            logprobs = lambda: u._logprobs.lower(self.state.params, plain)  # noqa: E731
            jobs.append(Job("reference logprobs", side, w.micro_batches, mesh, logprobs, unknown))
        return jobs


def _fresh_state(updater: Updater, params: Params) -> TrainState:
    from burnish.rl.optimizer import init_state

    return init_state(updater.options.optimizer, params)


@dataclass(frozen=True)
class Sampler:
    """The sampler's side: the functions of rollout/decode, with weights and caches without arrays."""

    spec: ModelSpec
    mesh: Mesh
    dtype: Any
    view: Params
    lanes: list[decode.LayerCache]
    own: list[decode.LayerCache]
    prefilled: list[decode.LayerCache]  # what one call of prefill returns
    way: Way

    @staticmethod
    def of(cfg: PlanConfig, spec: ModelSpec, mesh: Mesh, w: Workload) -> "Sampler":
        """Raises MeshError where the model can not be split as the mesh says. `w` has the longest lengths."""
        decode.check_fits(spec, mesh)
        dtype = compute_dtype(cfg.dtype)
        infos = param_infos(spec)

        def place(info: ParamInfo) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(info.shape, dtype, sharding=rules.sharding(info.axes, info.shape, mesh))

        rest = {name: place(info) for name, info in infos.items() if name not in ("layers", "tail")}
        layers = [{name: place(i) for name, i in layer_infos(spec.at(n)).items()} for n in range(spec.num_layers)]

        def cache(shape: tuple[int, ...]) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.sharding(decode.CACHE_AXES, shape, mesh))

        def caches(num: int, columns: int) -> list[decode.LayerCache]:
            def one(kind: ModelSpec) -> decode.LayerCache:
                K, N = decode.cache_heads(kind, mesh.shape), kind.head_dim
                return decode.LayerCache(cache((num, K, N, columns)), cache((num, K, columns, N)))

            return [one(spec.at(i)) for i in range(spec.num_layers)]

        top_k = cfg.decode_sampling_top_k
        sampling = SamplingParams(2, cfg.decode_sampling_temperature, top_k, cfg.decode_sampling_nucleus_p)
        return Sampler(
            spec=spec,
            mesh=mesh,
            dtype=dtype,
            view={**rest, "layers": layers},
            lanes=caches(w.lanes, w.lane_columns),
            own=caches(w.slots, w.own_columns),
            prefilled=caches(w.prefill_prompts, w.prefill_columns),
            way=cuts_from(sampling, spec.vocab_size)[1],
        )

    def jobs(self, side: Side, w: Workload, longest: Workload) -> list[Job]:
        """prefill and decode; of decode a run is one step."""
        whole = rules.replicated(self.mesh)

        def host(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

        def prefill() -> Any:
            tokens = host((longest.prefill_prompts, longest.prefill_columns), jnp.int32)
            lengths = host((longest.prefill_prompts,), jnp.int32)
            return decode.prefill.lower(self.spec, self.view, tokens, lengths, dtype=self.dtype)

        def decode_chunk() -> Any:
            B = longest.slots
            ints, number, real = host((B,), jnp.int32), host((), jnp.int32), host((), jnp.float32)
            return decode.decode_chunk.lower(
                self.spec, self.view, self.lanes, host((longest.lanes,), jnp.int32), self.own,
                decode.Rows(ints, ints, ints, host((B,), bool), ints), host((B, decode.CHUNK), jnp.float32),
                number, number, host((STOP_IDS,), jnp.int32), Cuts(real, number, real, real), self.way,
                dtype=self.dtype,
            )  # fmt: skip

        return [
            Job("prefill", side, w.prefill_calls, self.mesh, prefill),
            Job("decode", side, w.decode_steps, self.mesh, decode_chunk),
        ]


def handover_jobs(trainer: Trainer, sampler: Sampler, side: Side) -> list[Job]:
    """The sampler's weights cut out of the trainer's, cast and laid out anew, on the trainer's devices: one layer of
    each kind, and what is outside of layers."""
    spec, mesh = sampler.spec, trainer.updater.mesh
    params = trainer.state.params
    summed = set(mesh.devices.flat) != set(sampler.mesh.devices.flat)  # what goes to other devices is checked there

    def job(name: str, times: float, sources: Params, index: int | None, targets: Params) -> Job:
        ways = tuple(
            transfer.way_to(
                transfer.layout_on(sources[key].sharding, x.sharding),
                sources[key].sharding,
                sources[key].shape,
                index is not None,
            )
            for key, x in targets.items()
        )
        arrays = tuple(sources[key] for key in targets)
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=rules.replicated(mesh))
        indices = tuple(None if index is None else number for _ in targets)
        return Job(
            f"{HANDOVER}, {name}",
            side,
            times,
            mesh,
            lambda: transfer.cutter(sampler.dtype, ways, summed=summed).lower(arrays, indices),
        )

    jobs = []
    of_kind: dict[Any, list[int]] = {}
    for i in range(spec.num_layers):
        of_kind.setdefault((spec.at(i), layer_place(spec, i).index is None), []).append(i)
    for layers in of_kind.values():
        place = layer_place(spec, layers[0])
        held = params
        for key in place.path:
            held = held[key]
        jobs.append(job(f"layer {layers[0]}", len(layers), held, place.index, sampler.view["layers"][layers[0]]))
    rest = {name: x for name, x in sampler.view.items() if name != "layers"}
    jobs.append(job("rest", 1, params, None, rest))
    return jobs


HANDOVER = "weights to the sampler"

STOP_IDS = 8
"""Stop tokens that the compiled program has room for; the engine's least."""
