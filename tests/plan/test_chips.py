"""Names of slices, and what the chips in them are."""

import pytest

from burnish.plan.chips import CHIPS, parse_topology
from burnish.plan.errors import PlanError


@pytest.mark.parametrize(
    ("text", "shape", "chips", "devices"),
    [
        ("v6e-8", (2, 4), 8, 8),
        ("v6e:4x8", (4, 8), 32, 32),
        ("V6E-32", (4, 8), 32, 32),
        ("v5e-256", (16, 16), 256, 256),
        ("v5p-8", (2, 2, 1), 4, 4),  # v5p-N counts TensorCores
        ("tpu7x:2x2x1", (2, 2, 1), 4, 8),  # a chip is two devices
        ("h100-8", (8,), 8, 8),
        ("cpu-8", (), 8, 8),
    ],
)
def test_names_and_shapes(text, shape, chips, devices):
    topology = parse_topology(text)
    assert (topology.shape, topology.num_chips, topology.num_devices) == (shape, chips, devices)


def test_slices_multiply_the_devices():
    topology = parse_topology("v6e-8", num_slices=2)
    assert (topology.num_devices, topology.num_chips) == (16, 16)
    assert topology.name == "v6e:2x4"
    assert topology.describe() == "2 slices of 8 v6e chips (2x4)"


def test_only_the_slice_of_eight_is_one_host():
    assert parse_topology("v6e-8").chips_per_host == (2, 4, 1)
    assert parse_topology("v6e-32").chips_per_host == (2, 2, 1)
    assert parse_topology("v6e-1").chips_per_host == (1, 1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v6-8", "did you mean v6e"),
        ("v6e", "v6e-8"),
        ("v6e-7", "v6e-8 (2x4)"),
        ("v6e:2x4x1", "2 sizes"),
        ("v6e:0x4", "2 sizes"),
        ("tpu7x-8", "tpu7x:2x2x1"),
        ("h100-16", "h100-8"),
        ("h100:8", "h100-8"),
        ("cpu:2x4", "cpu-8"),
        ("cpu-99999999999999999999", "at most 1,024 virtual devices"),
        ("v6e:1000x1000", "at most 256 chips"),
        ("tpu7x:99x99x99", "at most 9,216 chips"),
        ("", "v6e-8"),
    ],
)
def test_what_is_no_topology_is_refused_with_what_would_be_right(text, words):
    with pytest.raises(PlanError, match="topology=") as refusal:
        parse_topology(text)
    assert words in str(refusal.value)


def test_a_number_and_its_shape_agree():
    for chip in (chip for chip in CHIPS.values() if chip.platform == "tpu"):
        cores = 2 if chip.name == "v5p" else 1
        for number, shape in chip.shapes.items():
            assert parse_topology(f"{chip.name}:{shape}").num_chips * cores == number


def test_gpus_are_those_of_one_node():
    node = parse_topology("h100-4")
    assert (node.name, node.describe()) == ("h100-4", "4 H100 GPUs of one node")
    with pytest.raises(PlanError, match="dcn_data_parallelism=2"):
        parse_topology("h100-8", num_slices=2)


def test_programs_have_the_part_of_a_gpu_that_jax_takes(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    whole = CHIPS["h100"].memory
    assert parse_topology("h100-8").chip.memory == int(0.75 * whole)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert parse_topology("h100-8").chip.memory == whole // 2
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "90%")
    with pytest.raises(PlanError, match="XLA_CLIENT_MEM_FRACTION=90%"):
        parse_topology("h100-8")


def test_virtual_devices_have_no_slices():
    with pytest.raises(PlanError, match="topology=cpu-8 with dcn_data_parallelism=2: virtual devices are of no slice"):
        parse_topology("cpu-8", num_slices=2)
