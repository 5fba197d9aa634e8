"""Machine types and shapes come to the hosts that GKE makes of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.launch.errors import LaunchError
from burnish.launch.topology import GENERATIONS, parse_shape, resolve

# From GKE's documentation of TPU node pools: machine type, topology, nodes.
KNOWN = [
    ("ct6e-standard-1t", "1x1", 1),
    ("ct6e-standard-8t", "2x4", 1),
    ("ct6e-standard-4t", "2x2", 1),
    ("ct6e-standard-4t", "2x4", 2),
    ("ct6e-standard-4t", "4x4", 4),
    ("ct6e-standard-4t", "4x8", 8),
    ("ct6e-standard-4t", "8x8", 16),
    ("ct6e-standard-4t", "8x16", 32),
    ("ct6e-standard-4t", "16x16", 64),
    ("ct5lp-hightpu-8t", "2x4", 1),
    ("ct5lp-hightpu-4t", "4x4", 4),
    ("ct5p-hightpu-4t", "2x2x1", 1),
    ("ct5p-hightpu-4t", "2x2x2", 2),
    ("ct5p-hightpu-4t", "4x4x4", 16),
    ("ct5p-hightpu-4t", "4x4x12", 48),
    ("ct4p-hightpu-4t", "2x2x4", 4),
    ("tpu7x-standard-4t", "4x4x8", 32),
]


@pytest.mark.parametrize(("machine", "topology", "hosts"), KNOWN)
def test_a_slice_has_the_hosts_that_gke_makes(machine, topology, hosts):
    made = resolve(machine, topology)
    assert (made.hosts, made.chips, made.topology) == (hosts, math.prod(parse_shape(topology)), topology)
    assert made.hosts * made.chips_per_host == made.chips


def test_what_workflow_b_asks_for():
    made = resolve("ct6e-standard-4t", "4x8")
    assert (made.hosts, made.chips_per_host) == (8, 4)
    assert (made.accelerator, made.pathways_instance_type) == ("tpu-v6e-slice", "tpuv6e:4x8")
    assert made == resolve("v6e-32", None) == resolve("v6e-32", "4x8")


@pytest.mark.parametrize(
    ("shorthand", "machine", "topology"),
    [
        ("v6e-1", "ct6e-standard-1t", "1x1"),
        ("v6e-4", "ct6e-standard-4t", "2x2"),
        ("v6e-8", "ct6e-standard-8t", "2x4"),
        ("v6e-256", "ct6e-standard-4t", "16x16"),
        ("v5litepod-16", "ct5lp-hightpu-4t", "4x4"),
        ("v5p-8", "ct5p-hightpu-4t", "2x2x1"),  # the number counts cores, two a chip
        ("v5p-32", "ct5p-hightpu-4t", "2x2x4"),
        ("v5p-128", "ct5p-hightpu-4t", "4x4x4"),
        ("v4-64", "ct4p-hightpu-4t", "2x4x4"),
    ],
)
def test_tpu_types_are_those_of_cloud_tpu(shorthand, machine, topology):
    made = resolve(shorthand, None)
    assert (made.machine_type, made.topology) == (machine, topology)


@given(st.sampled_from(GENERATIONS), st.integers(1, 9000))
def test_a_tpu_type_has_its_number_of_chips_or_is_refused(generation, number):
    try:
        made = resolve(f"{generation.name}-{number}", None)
    except LaunchError:
        return
    assert made.chips * generation.cores_per_unit == number
    assert generation.shape_is_valid(parse_shape(made.topology))


def test_a_cpu_machine_is_one_host_without_chips():
    made = resolve("e2-standard-8", None)
    assert (made.hosts, made.chips, made.is_tpu, made.accelerator, made.topology) == (1, 0, False, "", "")


@pytest.mark.parametrize(
    ("compute_type", "topology", "words"),
    [
        ("ct6e-standard-4t", None, "--topology is required"),
        ("ct6e-standard-4t", "3x3", "not a shape of v6e"),
        ("ct6e-standard-4t", "4x", "expected lengths such as 4x8"),
        ("ct6e-standard-4t", "9" * 5000 + "x8", "expected lengths such as 4x8"),
        ("v6e-" + "9" * 5000, None, "not a machine type that is known"),
        ("ct6e-standard-4t", "0x4", "expected lengths such as 4x8"),
        ("ct6e-standard-4t", "2x2x1", "not a shape of v6e"),
        ("ct6e-standard-8t", "4x8", "give --compute-type=ct6e-standard-4t"),
        ("ct6e-standard-4t", "1x1", "give --compute-type=ct6e-standard-1t"),
        ("v6e-32", "8x8", "give --topology=4x8"),
        ("v6e-33", None, "there is no slice of 33"),
        ("v9x-8", None, "no such TPU type"),
        ("ct6e-standard-3t", "2x2", "no such TPU machine type"),
        ("gpu", None, "not a machine type that is known"),
        ("e2-standard-8", "2x2", "leave --topology out"),
        ("ct5p-hightpu-4t", "4x4", "not a shape of v5p"),
        ("ct5p-hightpu-4t", "8x4x4", "not a shape of v5p"),
        ("ct5p-hightpu-4t", "2x4x8", "not a shape of v5p"),
    ],
)
def test_what_does_not_exist_is_refused_by_flag(compute_type, topology, words):
    with pytest.raises(LaunchError, match=r"^--(compute-type|topology)") as refused:
        resolve(compute_type, topology)
    assert words in str(refused.value)
