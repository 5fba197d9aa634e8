"""Whole plans of the embedded model: for virtual devices, for TPUs that are not there, and what does not fit."""

import dataclasses
import importlib.util
import io
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from burnish.config.overrides import load_config
from burnish.config.schema import PlanConfig
from burnish.errors import BurnishError
from burnish.models.params import init_params
from burnish.models.spec import ExpertsSpec
from burnish.plan import command, make, report
from burnish.plan.advice import longer_rows
from burnish.plan.chips import CHIPS, Topology, parse_topology
from burnish.plan.counts import matrices_read
from burnish.plan.estimate import Assumptions, Sizes, Split, Traffic, estimate
from burnish.plan.hlo import Collective
from burnish.plan.programs import out_of_memory
from burnish.plan.result import Memory, Moment, Program, size_words
from burnish.plan.search import search
from burnish.rollout import decode

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
SMALL = [
    "batch_size=8",
    "rl.num_generations=4",
    "rl.grpo_beta=0",
    "max_prefill_predict_length=64",
    "max_target_length=96",
    "remat_policy=none",
]


def plan_in_a_process(tmp_path, *options, code=0):
    """What `burnish plan` writes as JSON, and what it prints; tests have one device and no TPU settings."""
    file = tmp_path / "plan.json"
    command = [sys.executable, "-m", "burnish.cli.main", "plan", *options, f"json_file={file}"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == code, run.stderr
    return (json.loads(file.read_text()) if file.exists() else None), run.stdout + run.stderr


def one_device(memory=None):
    """This machine's first device as a chip with so much memory."""
    return Topology(dataclasses.replace(CHIPS["cpu"], memory=memory), (), 1, 1)


def setting(*options, topology=None):
    cfg = load_config(PlanConfig, ["topology=cpu-1", *SMALL, *options])
    return make.Setting.of(cfg, make.spec_of(cfg), topology or one_device(), jax.devices()[:1])


@pytest.fixture(scope="module")
def small():
    """A setting for one device of unknown memory, and its plan."""
    asked = setting("mu_dtype=bfloat16")
    return asked, make.make_plan(asked, exact=False)


def test_bytes_are_those_of_the_arrays_that_training_makes(small):
    planned, plan = small
    moments = {m.name: m.kinds for m in plan.moments}
    params = init_params(planned.spec, jax.random.key(0))
    updater, mesh = planned.trainer.updater, planned.sampler.mesh
    view, _ = decode.decode_view(planned.spec, params, mesh, jnp.float32, 0, None)
    state = updater.init(params)

    def size(tree):
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    w = planned.longest
    lanes = decode.empty_caches(planned.spec, w.lanes, w.lane_columns, jnp.float32, mesh)
    own = decode.empty_caches(planned.spec, w.slots, w.own_columns, jnp.float32, mesh)
    assert moments["gradients"][make.WEIGHTS] == size(state.params)
    assert moments["gradients"][make.OPTIMIZER] == size(state.opt_state)
    assert planned.trainer.micro_batches == 1
    assert moments["gradients"][make.GRADIENTS] == size(state.params)
    assert moments["gradients"][make.REFERENCE] == 0
    assert moments["decode"][make.VIEW] == size(view)
    assert moments["decode"][make.CACHES] == size(lanes) + size(own)
    assert plan.fits is None  # nobody knows how much memory virtual devices have


def test_with_several_micro_batches_there_are_two_gradients(small):
    _, plan = small
    planned = setting("mu_dtype=bfloat16", "train_micro_batch_size=2")
    assert planned.trainer.micro_batches == 4
    one, two = ({m.name: m.kinds for m in x} for x in (plan.moments, make.memory_moments(planned, plan.programs)))
    assert two["gradients"][make.GRADIENTS] == 2 * one["gradients"][make.GRADIENTS]
    assert two["optimizer"][make.GRADIENTS] == one["optimizer"][make.GRADIENTS]


@pytest.mark.slow
def test_search_finds_the_nearest_settings_that_fit(small):
    asked, plan = small
    needed = max(m.total for m in plan.moments)
    limited = one_device(int(0.6 * needed))
    assert dataclasses.replace(plan, topology=limited).fits is False

    found = search(asked.cfg, asked.spec, limited, jax.devices()[:1])
    assert found.found is not None
    assert found.found.fits
    assert found.changes
    assert max(m.total for m in found.found.moments) <= limited.chip.memory
    told = report.search_json(found)
    assert told["found"]["fits"] is True
    assert told["tried"][-1]["changes"] == found.changes
    assert "optimizer" not in found.changes  # what changes the mathematics is farther away than what costs time


def test_search_says_when_nothing_fits():
    asked = setting()
    found = search(asked.cfg, asked.spec, one_device(2**20), jax.devices()[:1])
    assert (found.found, found.tried) == (None, ())
    assert found.considered >= 5  # one for each optimizer at least


@pytest.mark.slow
def test_virtual_devices_are_planned_with_their_exchange(tmp_path):
    plan, printed = plan_in_a_process(tmp_path, "topology=cpu-4", "ici_data_parallelism=2", *SMALL)
    assert plan["meshes"]["trainer"] == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 1}
    gradients = next(p for p in plan["programs"] if p["name"] == "gradients")
    assert {axis for c in gradients["collectives"] for axis in c["axes"]} == {"data", "fsdp"}
    assert plan["estimate"] is None
    assert "No times are estimated" in printed


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu, the TPU compiler (extra tpu), is not installed")
def test_a_slice_of_tpus_is_planned_without_one(tmp_path):
    page = tmp_path / "plan.html"
    options = ["topology=v6e-8", *SMALL, "ici_data_parallelism=2", "rl.grpo_beta=0.08"]
    options += ["price_per_chip_hour=2", f"html_file={page}"]
    plan, printed = plan_in_a_process(tmp_path, *options)
    assert plan["fits"] is True
    assert plan["topology"]["chips"] == 8
    assert {p["name"] for p in plan["programs"]} == {
        "gradients",
        "optimizer",
        "reference logprobs",
        "prefill",
        "decode",
        "weights to the sampler, layer 0",  # all layers are of one kind
        "weights to the sampler, rest",
    }
    assert all(p["memory"] for p in plan["programs"])
    programs = {p["name"]: p["collectives"] for p in plan["programs"]}
    along_data = {name: [c for c in programs[name] if "data" in c["axes"]] for name in ("gradients", "optimizer")}
    sent = {name: sum(c["sent_bytes"] for c in found) for name, found in along_data.items()}
    assert sent["optimizer"] > 20 * sent["gradients"]  # copies exchange gradients once an update
    assert plan["estimate"]["step"] > plan["estimate"]["step_at_best"] > 0
    assert plan["price"] == pytest.approx(2 * plan["chip_hours"], abs=0.01)
    assert "by the compiler's account" in printed
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "http" not in text  # nothing outside the page


def test_without_the_compiler_the_extra_is_named(tmp_path):
    program = (
        "import sys; sys.modules['libtpu'] = None; from burnish.cli.main import main; main(['plan', 'topology=v6e-8'])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert "burnish[tpu]" in run.stderr


@pytest.mark.parametrize("option", ["json_file", "html_file"])
def test_where_a_plan_can_not_be_written_is_said_before_anything_is_compiled(option, tmp_path, monkeypatch):
    monkeypatch.setattr(make, "make_plan", lambda *_, **__: pytest.fail("compiled"))
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path, "is a directory"), (tmp_path / "file" / "x", "its directory cannot be made")):
        with pytest.raises(BurnishError, match=words) as refusal:
            command.plan(load_config(PlanConfig, ["topology=cpu-1", f"{option}={path}"]))
        assert f"{option}={path}" in str(refusal.value)


def test_a_run_that_does_not_fit_has_a_status_of_its_own_and_its_plan_is_written(small, tmp_path, monkeypatch):
    _, plan = small
    tight = dataclasses.replace(plan.topology, chip=dataclasses.replace(plan.topology.chip, memory=1000))
    monkeypatch.setattr(make, "make_plan", lambda *_, **__: dataclasses.replace(plan, topology=tight))
    monkeypatch.setattr(command, "prepare", lambda *_: None)  # it would settle how this process compiles
    file = tmp_path / "of" / "plan.json"
    with pytest.raises(BurnishError, match="does not fit") as refusal:
        command.plan(load_config(PlanConfig, ["topology=cpu-1", *SMALL, f"json_file={file}"]))
    assert refusal.value.exit_code == 3
    assert json.loads(file.read_text())["fits"] is False


def test_an_engine_that_can_not_be_planned_is_refused():
    with pytest.raises(BurnishError, match="rollout_engine=vllm: memory and time of vLLM are not known to plan"):
        load_config(PlanConfig, ["topology=v6e-8", "rollout_engine=vllm"])


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(Exception, match="prompt_tokens=300"):
        load_config(PlanConfig, ["topology=v6e-8", "prompt_tokens=300"])
    with pytest.raises(Exception, match="max_target_length"):
        load_config(PlanConfig, ["topology=v6e-8", "completion_tokens=1000"])


def test_what_the_compiler_says_of_too_large_programs():
    used = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 40.5G of 31.24G hbm."  # noqa: E501
    assert out_of_memory(used) == "needs 40.5GiB, more than the 31.24GiB that a program may use"
    temporaries = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (502.97G) exceeds "
        "available HBM (31.25G)."
    )
    assert "502.97GiB" in out_of_memory(temporaries)
    assert out_of_memory("INTERNAL: something else") is None


SIZES = Sizes(
    trainer=Split(tensor=1, expert=1, groups=8),
    sampler=Split(tensor=1, expert=1, groups=8),
    shared=True,
    copied=False,
    state_bytes=10**9,
    master_bytes=10**9,
    view_bytes=10**9,
)


def test_the_estimate_is_a_roofline():
    planned = setting("num_batches=7", "num_test_batches=0")
    topology, w = parse_topology("v6e-8"), planned.expected
    chip = topology.chip
    sent = {"gradients": Traffic(3e9, 10)}
    made = estimate(planned.spec, topology, w, SIZES, sent, Assumptions())
    phases = {p.name: p for p in made.phases}
    for p in made.phases:
        assert p.seconds >= p.at_best > 0
    gradients = phases["gradients"]
    slowest = max(
        gradients.flops / chip.flops,
        gradients.read / chip.memory_bandwidth,
        3e9 * w.micro_batches / (2 * chip.link_bandwidth),
    )
    assert gradients.at_best == pytest.approx(slowest)
    assert gradients.bound_by == "exchange between chips"
    assert made.step == pytest.approx(sum(p.seconds for p in made.phases))
    assert made.run == pytest.approx(7 * made.step)
    assert 0 < made.share_of_peak < 1
    assert phases["optimizer"].at_best == pytest.approx(2e9 / chip.memory_bandwidth)


def test_a_device_reads_its_part_of_the_weights_and_of_the_experts_that_its_group_needs():
    spec = setting().spec
    mixture = dataclasses.replace(spec, experts=ExpertsSpec(num_experts=8, num_active=2, d_expert=16))
    dense, experts = matrices_read(mixture, 5)
    split = Split(tensor=2, expert=4, groups=3)
    assert split.devices == 24
    assert split.read(mixture, 15) == pytest.approx(2 * (dense / 2 + experts / 8))


def test_sampling_and_training_overlap_only_on_devices_of_their_own():
    planned = setting("num_test_batches=0")
    topology = parse_topology("v6e-8")
    own = dataclasses.replace(SIZES, shared=False, copied=True)
    steps = {
        off_policy: estimate(
            planned.spec,
            topology,
            dataclasses.replace(planned.expected, off_policy=off_policy),
            own,
            {},
            Assumptions(),
        )
        for off_policy in (False, True)
    }
    seconds = [p.seconds for p in steps[True].phases]
    assert steps[False].step == pytest.approx(sum(seconds))
    assert steps[True].step == pytest.approx(max(sum(seconds[:2]), sum(seconds[2:])))


def longer_rows_of(planned, sent, temporaries, topology):
    """The advice for an update that sends so many bytes along fsdp in every pass, and as many along tensor."""
    along = [Collective("collective-permute", sent, (axis,), 2, 1.0, "") for axis in ("fsdp", "tensor")]
    gradients = Program("gradients", "all devices", 1, Memory(0, 0, 0, temporaries, 0), tuple(along), 0.0)
    w = planned.expected
    traffic = {"gradients": Traffic.of(along)}
    made = estimate(planned.spec, topology, w, SIZES, traffic, Assumptions())
    moments = [Moment("gradients", "all devices", {make.WEIGHTS: 2**30, make.TEMPORARIES: temporaries})]
    return longer_rows(planned.cfg, planned.spec, topology, (1, 1), gradients, moments, made, Assumptions())


def test_longer_rows_are_advised_where_exchange_is_most_of_the_update_and_memory_is_free():
    planned = setting("train_row_tokens=96")  # one completion of 32 tokens after a prompt of 64 in each row
    topology = parse_topology("v6e-8")
    now, GB = planned.expected, 10**9
    assert (now.row_length, now.micro_batches) == (96, 32)
    advice = longer_rows_of(planned, GB, 2**30, topology)
    # A prompt with all its completions is 192 tokens; four of them are 768.
    assert "train_row_tokens=768 " in advice
    assert "2 forward and backward passes in place of 32" in advice
    assert f"send {30 * GB / 2**30:.2f} GiB less" in advice  # along fsdp alone
    assert f"at most {1 + 768 / 96:.2f} GiB of 31.24 GiB" in advice
    assert "train_row_tokens=192 " in longer_rows_of(planned, GB, 12 * 2**30, topology)  # 768 would need 97 GiB
    assert longer_rows_of(planned, GB, 29 * 2**30, topology) is None
    assert longer_rows_of(planned, 10, 2**30, topology) is None


def test_tables_have_a_cell_for_every_column(small):
    _, plan = small
    for section in report.sections(plan):
        assert all(len(row) == len(section.columns) for row in section.rows)
    memory = report.sections(plan)[0]
    assert memory.title.startswith("Memory of one device, MiB")  # a small model
    assert f"{plan.moments[0].total / 2**20:.2f}" in np.array(memory.rows)[-1]


def test_a_terminal_of_80_columns_shows_whole_words_and_figures(small):
    _, plan = small
    printed = io.StringIO()
    report.print_plan(plan, Console(file=printed, width=80, force_terminal=True, color_system=None))
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    shown = set(printed.getvalue().split())
    for section in report.sections(plan):
        words = {word for column in section.columns for word in column.split()}
        words |= {word for row in section.rows for cell in row for word in cell.split()}
        assert words <= shown


def test_small_and_large_sizes_and_times_have_units_of_their_own():
    assert report.duration(0.0005) == "500 µs"
    assert report.duration(0.0704) == "70.4 ms"
    assert [report.duration(s) for s in (1.44, 47.2, 600, 9000)] == ["1.44 s", "47 s", "10 min", "2.5 h"]
    assert size_words(40 * 2**20) == "40.00 MiB"
    assert size_words(31.24 * 2**30) == "31.24 GiB"
