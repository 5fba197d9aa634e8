"""How long a run will take, as an estimate from a roofline: the figures of a chip's data sheet, the model's own count
of FLOPs and bytes, and what the compiled programs send between chips.

Each phase takes the longest of computing, reading memory, and exchanging, at best; the estimate takes shares of the
data sheet's rates that programs reach in practice, and hides no exchange behind computing. No figure here was measured
on the chip in question; every assumption is in `Assumptions` and printed with the result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from burnish.models.spec import ModelSpec
from burnish.plan import counts
from burnish.plan.chips import Chip, Topology, memory_share
from burnish.plan.hlo import Collective
from burnish.plan.workload import Workload


@dataclass(frozen=True)
class Assumptions:
    """What the estimate takes for granted besides the data sheet."""

    matrix_share: float = 0.5
    """Of the peak rate, in matrix products of training and prefill."""

    memory_share: float = 0.7
    """Of the memory bandwidth."""

    link_share: float = 0.8
    """Of the one-way bandwidth of the links that a collective uses: two of a torus (one axis in both directions, no
    wrap-around), all of a GPU."""

    collective_latency: float = 5e-6
    """Seconds that every collective takes besides its bytes."""

    call_overhead: float = 1e-3
    """Seconds on the host for each call of a compiled program (a chunk of decode steps is one call)."""

    @staticmethod
    def of(chip: Chip) -> "Assumptions":
        """What is assumed of such chips. A collective of GPUs is a kernel of its own on each of them, of TPUs a part of
        the program."""
        return Assumptions(collective_latency=15e-6) if chip.platform == "gpu" else Assumptions()

    def describe(self, workload: Workload, chip: Chip) -> list[str]:
        """One sentence each."""
        links = "all NVLinks of a GPU" if chip.platform == "gpu" else "two links"
        limit = f"JAX takes {memory_share():.0%} of a GPU's memory, which has to do (XLA_CLIENT_MEM_FRACTION sets it)"
        return [
            f"every prompt has {workload.prompt_tokens} tokens and every completion {workload.completion_tokens} "
            "(prompt_tokens and completion_tokens say otherwise); all completions have an advantage other than 0",
            f"matrix products of training and prefill run at {self.matrix_share:.0%} of the peak rate, memory is read "
            f"at {self.memory_share:.0%} of its bandwidth",
            f"a collective uses {links} at {self.link_share:.0%} of their one-way bandwidth and takes "
            f"{self.collective_latency * 1e6:g} µs more; none is hidden behind computing",
            f"each call of a compiled program costs {self.call_overhead * 1e3:g} ms on the host",
            "experts are used evenly",
            *([limit] if chip.platform == "gpu" else []),
            f"not counted: {'starting kernels, ' if chip.platform == 'gpu' else ''}starting up, reading weights, "
            "compiling, checking answers, writing checkpoints",
        ]


@dataclass(frozen=True)
class Traffic:
    """What one execution of a program exchanges, per device."""

    sent: float  # bytes
    count: float  # collectives

    @staticmethod
    def of(collectives: Sequence[Collective]) -> "Traffic":
        return Traffic(sum(c.sent * c.trips for c in collectives), sum(c.trips for c in collectives))


@dataclass(frozen=True)
class Phase:
    """One part of a step. Seconds at best are those of the data sheet, with everything overlapped."""

    name: str
    model_flops: float  # of all devices: what the mathematics needs
    flops: float  # per device: with padding and recomputation
    read: float  # bytes of memory per device
    sent: float  # bytes per device
    at_best: float  # seconds
    seconds: float
    bound_by: str


@dataclass(frozen=True)
class Estimate:
    """A step and a run. `step` is less than the sum of phases where sampling and training overlap."""

    phases: tuple[Phase, ...]
    step_at_best: float
    step: float
    evaluation: float  # seconds of the evaluations before and after
    run: float
    sampled_tokens: int  # of a step
    trained_tokens: int
    share_of_peak: float  # model FLOPs of a step over what all devices could compute in its time

    @property
    def tokens_per_second(self) -> float:
        return self.sampled_tokens / self.step


@dataclass(frozen=True)
class Split:
    """How the weights of a layer are split while it is computed (what fsdp splits is gathered by then), and into how
    many groups of devices the tokens are."""

    tensor: int
    expert: int
    groups: int

    @property
    def devices(self) -> int:
        return self.tensor * self.expert * self.groups

    def read(self, spec: ModelSpec, tokens: float, itemsize: int = 2) -> float:
        """Bytes of all layers' weights that a device reads in a pass over `tokens` tokens, all devices' together. The
        devices that share out the experts work on the same tokens."""
        dense, experts = counts.matrices_read(spec, tokens / self.groups)
        return itemsize * (dense / self.tensor + experts / (self.tensor * self.expert))


@dataclass(frozen=True)
class Sizes:
    """What the estimate needs to know of the two sides."""

    trainer: Split
    sampler: Split
    shared: bool  # the same devices do both
    copied: bool  # weights that are laid out for the sampler go to other devices then, or to the same in another order
    state_bytes: int  # per trainer device: weights, optimizer state and gradients
    master_bytes: int  # per trainer device: weights
    view_bytes: int  # per sampler device: weights


def estimate(
    spec: ModelSpec,
    topology: Topology,
    workload: Workload,
    sizes: Sizes,
    traffic: dict[str, Traffic],
    assume: Assumptions,
) -> Estimate | None:
    """The estimate; None where the chip's rates are not known. `traffic` is by program: gradients, logprobs, apply,
    prefill, decode (of one step) and transfer; a program that is not there exchanges nothing."""
    chip = topology.chip
    if chip.flops is None:
        return None
    clock = _Clock(topology, assume)
    none = Traffic(0.0, 0.0)

    def sent(program: str, times: float) -> Traffic:
        one = traffic.get(program, none)
        return Traffic(one.sent * times, one.count * times)

    w = workload
    prefill, decode = _sampling(spec, w, sizes, w.prompts * w.completions, w.prompts)
    phases = [
        clock.phase("prefill", *prefill, sent("prefill", w.prefill_calls), w.prefill_calls, matrices=True),
        clock.phase("decode", *decode, sent("decode", w.decode_steps), w.decode_calls, matrices=False),
    ]

    row_tokens = w.micro_batches * w.rows * w.row_length  # with padding
    attention = w.prompts * counts.attention_flops(spec, w.prompt_tokens, w.completion_tokens, w.completions)
    model_forward = counts.forward_flops(spec, w.row_tokens, attention, w.trained_tokens)
    forward = counts.forward_flops(spec, row_tokens, attention, w.trained_tokens)
    layers = counts.forward_flops(spec, row_tokens, attention, 0)
    weights_read = sizes.trainer.read(spec, w.rows * w.row_length)
    passes = 3 + (w.recomputes and 1)
    if w.reference:
        phases.append(
            clock.phase(
                "reference logprobs",
                model_forward,
                forward / sizes.trainer.devices,
                weights_read * w.micro_batches,
                sent("logprobs", w.micro_batches),
                w.micro_batches,
                matrices=True,
            )
        )
    times = w.micro_batches * w.iterations
    phases.append(
        clock.phase(
            "gradients",
            3 * model_forward * w.iterations,
            (3 * forward + (layers if w.recomputes else 0)) * w.iterations / sizes.trainer.devices,
            passes * weights_read * times,
            sent("gradients", times),
            times,
            matrices=True,
        )
    )
    phases.append(
        clock.phase(
            "optimizer",
            0.0,
            0.0,
            2.0 * sizes.state_bytes * w.iterations,
            sent("apply", w.iterations),
            w.iterations,
            matrices=False,
        )
    )
    moved = sizes.master_bytes + sizes.view_bytes
    transfer = sent("transfer", 1)
    if sizes.copied:
        transfer = Traffic(transfer.sent + sizes.view_bytes, transfer.count + w.num_leaves)
    phases.append(clock.phase("weights to the sampler", 0.0, 0.0, moved, transfer, 1, matrices=False))

    sampling = sum(p.seconds for p in phases[:2])
    sampling_best = sum(p.at_best for p in phases[:2])
    rest, rest_best = sum(p.seconds for p in phases[2:]), sum(p.at_best for p in phases[2:])
    overlap = not sizes.shared and w.off_policy
    step = max(sampling, rest) if overlap else sampling + rest
    step_at_best = max(sampling_best, rest_best) if overlap else sampling_best + rest_best
    per_completion = sampling / (w.prompts * w.completions)
    evaluation = 2 * w.eval_completions * per_completion
    model_flops = sum(p.model_flops for p in phases)
    return Estimate(
        phases=tuple(phases),
        step_at_best=step_at_best,
        step=step,
        evaluation=evaluation,
        run=w.steps * step + evaluation,
        sampled_tokens=w.prompts * w.completions * w.completion_tokens,
        trained_tokens=w.trained_tokens,
        share_of_peak=model_flops / (step * topology.num_devices * chip.flops),
    )


def _sampling(
    spec: ModelSpec, w: Workload, sizes: Sizes, completions: int, prompts: int
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """(model FLOPs, FLOPs per device, bytes read per device) of prefill and of decoding."""
    n = sizes.sampler.devices
    prompt_attention = counts.attention_flops(spec, w.prompt_tokens, 0, 0)
    prefill_flops = prompts * counts.forward_flops(spec, w.prompt_tokens, prompt_attention, 0)
    prefill_read = w.prefill_calls * sizes.sampler.read(spec, w.prefill_tokens)

    with_completions = counts.attention_flops(spec, w.prompt_tokens, w.completion_tokens, w.completions)
    tokens = completions * w.completion_tokens
    decode_flops = counts.forward_flops(spec, tokens, prompts * (with_completions - prompt_attention), tokens)
    head = 2.0 * spec.vocab_size * spec.d_model / sizes.sampler.tensor
    weights = sizes.sampler.read(spec, w.slots) + head
    # A lane's prompt is read once for its slots; a row's own columns once each.
    per_step = w.slots / n * counts.cache_read(spec, w.completion_tokens / 2, 2)
    per_step += w.lanes / n * counts.cache_read(spec, w.prompt_tokens, 2)
    decode_read = w.decode_steps * (weights + per_step)
    return (prefill_flops, prefill_flops / n, prefill_read), (decode_flops, decode_flops / n, decode_read)


@dataclass(frozen=True)
class _Clock:
    """From FLOPs and bytes to seconds."""

    topology: Topology
    assume: Assumptions

    def phase(
        self,
        name: str,
        model_flops: float,
        flops: float,
        read: float,
        traffic: Traffic,
        calls: float,
        *,
        matrices: bool,
    ) -> Phase:
        chip, a = self.topology.chip, self.assume
        assert chip.flops is not None
        assert chip.memory_bandwidth is not None
        assert chip.link_bandwidth is not None
        computing, reading = flops / chip.flops, read / chip.memory_bandwidth
        sending = traffic.sent / (chip.links * chip.link_bandwidth)
        likely_computing = computing / (a.matrix_share if matrices else 1.0)
        likely_reading = reading / a.memory_share
        waiting = traffic.count * a.collective_latency + calls * a.call_overhead
        seconds = max(likely_computing, likely_reading) + sending / a.link_share + waiting
        parts = {
            "computing": likely_computing,
            "reading memory": likely_reading,
            "exchange between chips": sending / a.link_share,
            "latency of collectives and calls": waiting,
        }
        return Phase(
            name=name,
            model_flops=model_flops,
            flops=flops,
            read=read,
            sent=traffic.sent,
            at_best=max(computing, reading, sending),
            seconds=seconds,
            bound_by=max(parts, key=parts.__getitem__),
        )


def chip_hours(seconds: float, topology: Topology) -> float:
    return seconds / 3600 * topology.num_chips


def price(hours: float, per_chip_hour: float | None) -> float | None:
    """What chip-hours cost, rounded up to a cent."""
    return None if per_chip_hour is None else math.ceil(hours * per_chip_hour * 100) / 100
