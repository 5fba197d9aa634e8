"""What would make a run that fits faster, from what its plan knows already: nothing is compiled for it.

So far longer rows alone: weights are gathered and gradients are summed up for every row of a device, so an update that
is bound by exchange wants few, long rows, as far as there is memory for their activations.
"""

from burnish.config.schema import PlanConfig
from burnish.models.spec import ModelSpec
from burnish.plan.chips import Topology
from burnish.plan.estimate import Assumptions, Estimate
from burnish.plan.result import Moment, Program, size_words
from burnish.plan.workload import Workload, workload

_PER_PASS = {"data", "fsdp"}
"""Mesh axes along which weights and gradients go, whose bytes do not depend on the rows' length."""


def longer_rows(
    cfg: PlanConfig,
    spec: ModelSpec,
    topology: Topology,
    shards: tuple[int, int],
    gradients: Program,
    moments: list[Moment],
    estimate: Estimate,
    assume: Assumptions,
) -> str | None:
    """One sentence, if the update is bound by exchange and there is memory for rows twice as long, or four or eight
    times. `shards`: into how many parts trainer and sampler split rows. The memory said is what it takes at most: all
    temporaries are taken to grow with the rows."""
    chip = topology.chip
    phase = next(p for p in estimate.phases if p.name == "gradients")
    moment = next(m for m in moments if m.name == "gradients")
    if phase.bound_by != "exchange between chips" or chip.memory is None or gradients.memory is None:
        return None
    assert chip.link_bandwidth is not None
    now, longest = (workload(cfg, spec, *shards, longest=which) for which in (False, True))
    found: tuple[int, Workload, int] | None = None
    for factor in (2, 4, 8):
        wider = cfg.model_copy(update={"train_row_tokens": factor * max(cfg.train_row_tokens, longest.row_length)})
        then, longest_then = (workload(wider, spec, *shards, longest=which) for which in (False, True))
        grown = longest_then.row_length / longest.row_length - 1
        needed = moment.total + int(gradients.memory.temporaries * max(grown, 0))
        if needed > chip.memory:
            break
        if then.micro_batches < (found[1] if found else now).micro_batches:
            found = wider.train_row_tokens, then, needed
    if found is None:
        return None
    row_tokens, then, needed = found
    saved = _sent(gradients, now, now) - _sent(gradients, now, then)
    seconds = saved * cfg.rl.num_iterations / (2 * chip.link_bandwidth * assume.link_share)
    less, most, memory = size_words(saved), size_words(needed), size_words(chip.memory)
    return (
        f"Exchange between chips takes most of the update: train_row_tokens={row_tokens} would do with "
        f"{then.micro_batches} forward and backward passes in place of {now.micro_batches}, send {less} less per "
        f"update and device (about {seconds:.2g} s less per step), and need at most {most} of {memory}"
    )


def _sent(gradients: Program, now: Workload, then: Workload) -> float:
    """Bytes that a device sends in an update with the passes of `then`, if a pass of `now` sends what was compiled."""
    total = 0.0
    for (_, axes), (sent, _) in gradients.exchanged().items():
        per_pass = bool(axes) and set(axes) <= _PER_PASS
        total += sent * (then if per_pass else now).micro_batches
    return total
