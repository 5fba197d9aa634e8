"""Makes a plan: meshes, workload, compiled programs, memory at every moment of a step, and the estimate."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from burnish.config.schema import PlanConfig
from burnish.models.families import preset_config, spec_from_hf
from burnish.models.params import num_params
from burnish.models.spec import ModelSpec
from burnish.parallel import rules
from burnish.plan import estimate as estimates
from burnish.plan.advice import longer_rows
from burnish.plan.chips import Topology
from burnish.plan.estimate import Assumptions, Sizes, Split, Traffic
from burnish.plan.programs import HANDOVER, Job, Sampler, Trainer, compile_job, device_bytes, handover_jobs
from burnish.plan.result import Moment, Plan, Program, Side
from burnish.plan.workload import Workload, workload
from burnish.rl.devices import check_model, choose_devices, sampler_mesh, sampler_sizes, trainer_mesh, trainer_sizes
from burnish.rl.loading import open_model

WEIGHTS = "weights"
OPTIMIZER = "optimizer state"
GRADIENTS = "gradients"
REFERENCE = "reference weights"
VIEW = "sampler's weights"
CACHES = "keys and values"
TEMPORARIES = "activations and temporaries"
CODE = "code"
OTHER = "inputs and results"


def spec_of(cfg: PlanConfig) -> ModelSpec:
    """The model: the preset of model_name, or what the checkpoint's config.json says."""
    if cfg.model_name is not None:
        return spec_from_hf(preset_config(cfg.model_name))
    return open_model(cfg).spec


@dataclass(frozen=True)
class Setting:
    """A run laid out on its devices, nothing compiled yet."""

    cfg: PlanConfig
    spec: ModelSpec
    topology: Topology
    trainer: Trainer
    sampler: Sampler
    expected: Workload
    longest: Workload
    shared: bool  # the same devices do both

    @staticmethod
    def of(cfg: PlanConfig, spec: ModelSpec, topology: Topology, devices: Sequence[jax.Device]) -> "Setting":
        """Raises BurnishError where devices or model can not be split as the options say."""
        chosen = choose_devices(cfg, devices)
        check_model(spec, trainer_sizes(cfg, chosen.trainer))
        check_model(spec, sampler_sizes(cfg, chosen.sampler))
        on_trainer, on_sampler = trainer_mesh(cfg, chosen.trainer), sampler_mesh(cfg, chosen.sampler)
        shards = rules.ways("batch", on_trainer.shape), rules.ways("batch", on_sampler.shape)
        longest = workload(cfg, spec, *shards, longest=True)
        return Setting(
            cfg=cfg,
            spec=spec,
            topology=topology,
            trainer=Trainer.of(cfg, spec, on_trainer),
            sampler=Sampler.of(cfg, spec, on_sampler, longest),
            expected=workload(cfg, spec, *shards),
            longest=longest,
            shared=not chosen.split,
        )

    @property
    def sides(self) -> tuple[Side, Side]:
        """Of the trainer and of the sampler."""
        return ("all devices", "all devices") if self.shared else ("trainer", "sampler")

    def jobs(self) -> list[Job]:
        """Every program of a step, those that are likeliest not to fit first."""
        on_trainer, on_sampler = self.sides
        gradients, *rest = self.trainer.jobs(on_trainer, self.expected)
        prefill, decode = self.sampler.jobs(on_sampler, self.expected, self.longest)
        return [gradients, decode, *rest, prefill, *handover_jobs(self.trainer, self.sampler, on_trainer)]


def make_plan(
    setting: Setting, *, exact: bool, on_program: Callable[[str], None] = lambda name: None, stop_early: bool = False
) -> Plan:
    """Compiles every program of a step. `on_program` is told the name of each before it is compiled; with `stop_early`
    nothing more is compiled once it is clear that the run does not fit."""
    start = time.perf_counter()
    programs: list[Program] = []
    for job in setting.jobs():
        on_program(job.name)
        programs.append(compile_job(job))
        if stop_early and too_large(setting, programs):
            break
    moments = memory_moments(setting, programs)
    assume = Assumptions.of(setting.topology.chip)
    w = setting.expected
    estimate = None
    if all(p.memory is not None for p in programs):
        names = {"reference logprobs": "logprobs", "optimizer": "apply"}
        traffic = {names.get(p.name, p.name): Traffic.of(p.collectives) for p in programs}
        moved = [(Traffic.of(p.collectives), p.per_step) for p in programs if p.name.startswith(HANDOVER)]
        traffic["transfer"] = Traffic(sum(t.sent * n for t, n in moved), sum(t.count * n for t, n in moved))
        estimate = estimates.estimate(setting.spec, setting.topology, w, sizes(setting), traffic, assume)
    advice = None
    if estimate:
        shards = (
            rules.ways("batch", setting.trainer.updater.mesh.shape),
            rules.ways("batch", setting.sampler.mesh.shape),
        )
        gradients = next(p for p in programs if p.name == "gradients")
        advice = longer_rows(setting.cfg, setting.spec, setting.topology, shards, gradients, moments, estimate, assume)
    hours = estimates.chip_hours(estimate.run, setting.topology) if estimate else None
    cfg = setting.cfg
    given = {k: v for k, v in cfg.public_dump().items() if k in cfg.model_fields_set}
    return Plan(
        model=cfg.model_name or cfg.load_parameters_path,
        num_params=num_params(setting.spec),
        topology=setting.topology,
        meshes={
            "trainer": dict(setting.trainer.updater.mesh.shape),
            "sampler": dict(setting.sampler.mesh.shape),
        },
        workload=w,
        longest=setting.longest,
        options=given,
        exact=exact,
        programs=tuple(programs),
        moments=tuple(moments),
        estimate=estimate,
        assumptions=tuple(assume.describe(w, setting.topology.chip)) if estimate else (),
        advice=(advice,) if advice else (),
        chip_hours=hours,
        price=None if hours is None else estimates.price(hours, cfg.price_per_chip_hour),
        seconds=time.perf_counter() - start,
    )


def too_large(setting: Setting, programs: Sequence[Program]) -> bool:
    limit = setting.topology.chip.memory
    moments = memory_moments(setting, programs)
    return any(m.failure or (limit is not None and m.total > limit) for m in moments)


def sizes(setting: Setting) -> Sizes:
    trainer, sampler = setting.trainer, setting.sampler
    return Sizes(
        trainer=_split(trainer.updater.mesh),
        sampler=_split(sampler.mesh),
        shared=setting.shared,
        copied=list(trainer.updater.mesh.devices.flat) != list(sampler.mesh.devices.flat),
        state_bytes=device_bytes(trainer.state) + device_bytes(trainer.grads),
        master_bytes=device_bytes(trainer.state.params),
        view_bytes=device_bytes(sampler.view),
    )


def _split(mesh: Mesh) -> Split:
    sizes = mesh.shape
    return Split(sizes["tensor"], sizes["expert"], sizes["data"] * sizes["fsdp"])


def memory_moments(setting: Setting, programs: Sequence[Program]) -> list[Moment]:
    """What one device holds while each of the programs runs, and while weights and caches are moved."""
    trainer, sampler, longest = setting.trainer, setting.sampler, setting.longest
    _, on_sampler = setting.sides
    params, opt = device_bytes(trainer.state.params), device_bytes(trainer.state.opt_state)
    grads = device_bytes(trainer.grads)
    reference = device_bytes(trainer.state.params) if longest.reference else 0
    view, lanes, own = (device_bytes(x) for x in (sampler.view, sampler.lanes, sampler.own))
    prefilled = device_bytes(sampler.prefilled)
    # What stays where it is while the other side works.
    training = {WEIGHTS: params, OPTIMIZER: opt, REFERENCE: reference}
    sampling = {VIEW: view}
    if setting.shared:
        training = sampling = training | sampling

    def during(program: Program, held: dict[str, int], own_arguments: int, own_outputs: int) -> Moment:
        if program.memory is None:
            return Moment(program.name, program.side, held, program.failure)
        m = program.memory
        other = max(0, m.arguments - own_arguments) + max(0, m.outputs - m.aliased - own_outputs)
        return Moment(
            program.name, program.side, held | {TEMPORARIES: m.temporaries, CODE: m.code, OTHER: other}
        )  # fmt: skip

    moments = []
    for program in programs:
        if program.name == "gradients":
            several = 2 if trainer.micro_batches > 1 else 1  # the sum so far, and those of this micro-batch
            moments.append(during(program, training | {GRADIENTS: several * grads}, params, grads))
        elif program.name == "optimizer":
            moments.append(during(program, training | {GRADIENTS: grads}, params + opt + grads, 0))
        elif program.name == "reference logprobs":
            moments.append(during(program, training, params, 0))
        elif program.name == "prefill":
            held = sampling | {CACHES: lanes + prefilled}
            moments.append(during(program, held, view, prefilled))
        elif program.name == "decode":
            moments.append(during(program, sampling | {CACHES: lanes + own}, view + lanes + own, 0))
    # Caches double when they are full: the old ones are there until the last layer's is copied.
    if longest.own_columns > longest.first_columns:
        moments.append(Moment("caches grow", on_sampler, sampling | {CACHES: lanes + own + own // 2}))
    handed = [p for p in programs if p.name.startswith(HANDOVER)]
    if handed:
        moments.append(_handover(setting, handed, training))
    return moments


def _handover(setting: Setting, programs: Sequence[Program], training: dict[str, int]) -> Moment:
    """The sampler gets its weights. On the same devices its old ones are gone by then; to others go `chunk` arrays at a
    time, all of them if that is not limited."""
    on_trainer, _ = setting.sides
    failure = next((p.failure for p in programs if p.failure), "")
    temporaries = max(p.memory.temporaries if p.memory else 0 for p in programs)
    kinds = training | {TEMPORARIES: temporaries}
    if not setting.shared:
        arrays, chunk = jax.tree.leaves(setting.sampler.view), setting.cfg.rl.reshard_chunk_size
        largest = sorted(map(device_bytes, arrays))[-(chunk or len(arrays)) :]
        kinds |= {VIEW: sum(largest)}
    return Moment(HANDOVER, on_trainer, kinds, failure)
