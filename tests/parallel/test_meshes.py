"""What is computed does not depend on the mesh, and nothing is on a device that the table splits over several."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from eight_devices import DENSE, MODELS
from virtual_devices import FLAGS, found_by

from burnish.models.params import ParamInfo, param_infos
from burnish.models.spec import ExpertsSpec
from burnish.parallel.errors import MeshError
from burnish.parallel.mesh import MeshSizes
from burnish.parallel.rules import TABLE
from burnish.rl.devices import check_model

PROGRAM = Path(__file__).with_name("eight_devices.py")
SMALL = 1e-5
RUNS = [
    "dense/data8/adamw",
    "dense/fsdp8/adamw",
    "dense/fsdp4tensor2/adamw",
    "dense/fsdp4tensor2/adafactor",
    "dense/data2fsdp2tensor2/adamw",
    "experts/fsdp2expert2tensor2/adamw",
    "experts/data2fsdp2expert2/adamw",
    "experts/fsdp2expert2tensor2/adafactor",
]
SIZES = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "fsdp4tensor2": {"fsdp": 4, "tensor": 2},
    "fsdp2expert2tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
    "data2fsdp2tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
    "data2fsdp2expert2": {"data": 2, "fsdp": 2, "expert": 2},
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by(PROGRAM, tmp_path_factory.mktemp("meshes"), 8, FLAGS)


@pytest.mark.parametrize(
    "name",
    ["dense/data8", "dense/fsdp8", "dense/fsdp4tensor2", "dense/fsdp2tensor4", "experts/fsdp2expert2tensor2"],
)
def test_logits_logprobs_and_gradients_are_those_of_one_device(found, name):
    """Rows of 320 tokens, of which only visible blocks are computed; with tensor 4 there are fewer kv heads than
    devices."""
    assert max(found[f"{name}/values"].values()) < SMALL


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith("adamw")])
def test_three_steps_are_those_of_one_device(found, name):
    run = found[name]
    for step, reference in zip(run["metrics"], run["reference"], strict=True):
        assert step == pytest.approx(reference, rel=SMALL)
    assert run["weights"] < SMALL


@pytest.mark.parametrize(
    "name", ["dense/data8", "dense/fsdp4tensor2", "dense/fsdp2tensor4", "experts/fsdp2expert2tensor2"]
)
def test_three_steps_of_adafactor_are_as_near_to_float64_as_those_of_one_device(found, name):
    """Adafactor divides a gradient by the root of its own mean square, without Adam's eps: where the gradient nearly
    vanishes, rounding decides about its size, on one device as on many. What is the same is the distance to the truth;
    a mean over a part of the devices, or in low precision, would make it many times larger."""
    run, alone = found[f"{name}/adafactor"], found[f"{name.split('/')[0]}/one/adafactor"]
    for step, reference in zip(run["metrics"], run["reference"], strict=True):
        assert step == pytest.approx(reference, rel=SMALL)
    assert alone["error"] < 2 * SMALL
    assert run["error"] < 2 * alone["error"]


def infos_of(name):
    """The arrays of a run's model by path, and the sizes of its mesh."""
    model, mesh, _ = name.split("/")
    tree = param_infos(MODELS[model])
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, ParamInfo))
    infos = {jax.tree_util.keystr(path, simple=True, separator="/"): info for path, info in leaves}
    return infos, {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | SIZES[mesh]


def part_of(info, sizes):
    """The shape of a device's part, by the table."""
    ways = [int(np.prod([sizes[m] for m in TABLE[axis]])) for axis in info.axes]
    return [n // w for n, w in zip(info.shape, ways, strict=True)]


@pytest.mark.parametrize("name", RUNS)
def test_each_device_has_its_part_of_weights_and_moments(found, name):
    infos, sizes = infos_of(name)
    split = found[name]["split"]
    for path, info in infos.items():
        assert split[f"params/{path}"] == [list(info.shape), part_of(info, sizes)], path
        if name.endswith("adamw"):
            for moment in ("mu", "nu"):
                assert split[f"moments/{moment}/{path}"] == [list(info.shape), part_of(info, sizes)], path


def test_averaged_moments_are_split_too(found):
    split = found["dense/fsdp4tensor2/adafactor"]["split"]
    rows = {key: value for key, value in split.items() if "v_row" in key or "v_col" in key}
    of_mlp = [value for key, value in rows.items() if key.endswith("gate_proj")]
    assert sorted(of_mlp) == [[[2, 128], [2, 32]], [[2, 256], [2, 128]]]


@pytest.mark.parametrize("name", RUNS)
def test_no_program_holds_a_whole_weight_or_all_logits(found, name):
    """In the compiled gradient: the stacked weights and the logits of a micro-batch are there in parts only."""
    infos, sizes = infos_of(name)
    shapes = [list(shape) for shape in found[name]["shapes"]]
    for path, info in infos.items():
        if info.axes[0] == "layers" and part_of(info, sizes) != list(info.shape):
            assert list(info.shape) not in shapes, path
    if sizes["tensor"] > 1:
        vocab = DENSE.vocab_size
        assert not [s for s in shapes if len(s) > 1 and s[-1] == vocab], "logits of the whole vocabulary"


def test_the_collectives_of_the_update_are_those_of_the_axes_in_use(found):
    """Copies of the weights exchange logprobs in the end, and metrics; fsdp gathers one layer's weights and exchanges
    looked-up rows of the embeddings; tensor sums activations; experts gather the tokens of their group and scatter the
    sums. Nothing large is permuted."""
    of = {name: found[name]["collectives"] for name in RUNS}
    logprobs = found["dense/data8/adamw"]["rows"]
    data = of["dense/data8/adamw"]
    assert data["all-gather"] == [logprobs]
    assert not data["all-to-all"] + data["reduce-scatter"]

    fsdp = of["dense/fsdp8/adamw"]
    assert [128, 256] in fsdp["all-gather"]
    assert fsdp["all-to-all"] == [[1, 64, 16]]
    assert fsdp["reduce-scatter"] == [[512, 16]]  # the gradient of the head

    row, width = [4, 64], 128
    tensor = of["dense/fsdp4tensor2/adamw"]
    assert [row[1], width] in tensor["all-reduce"]  # a row of this device: attention and MLP

    experts = of["experts/fsdp2expert2tensor2/adamw"]
    assert [2, row[1], width] in experts["all-gather"]
    assert [row[1], width] in experts["reduce-scatter"]
    for name, collectives in of.items():
        largest = max([int(np.prod(shape)) for shape in collectives["collective-permute"]], default=0)
        assert largest <= (row[0] * row[1] if name.startswith("experts") else 0), name  # routing weights


@pytest.mark.parametrize("name", [name for name in RUNS if "data" in name])
def test_copies_of_the_weights_exchange_gradients_once_an_update(found, name):
    """However many micro-batches there are; and the sum takes the place of what is summed."""
    run = found[name]
    if "data2" in name:
        assert run["micro_batches"] > 1
    of_device = sum(4 * int(np.prod(part)) for key, (_, part) in run["split"].items() if key.startswith("params/"))
    over_data = [size for _, axes, size, _ in run["gradients"] if "data" in axes]
    assert sum(over_data) < 0.03 * of_device  # logprobs, metrics and what experts got
    assert [kind for kind, axes, *_ in run["update"] if "data" in axes] == ["all-reduce"]
    assert sum(size for _, axes, size, _ in run["update"] if axes == ["data"]) == of_device
    reused, arguments = run["update_reuses"]
    assert reused == arguments


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("experts")])
def test_experts_are_chosen_and_counted_on_each_devices_rows(found, name):
    large = [source for kind, _, _, source in found[name]["gradients"] if kind == "all-gather"]
    assert not [source for source in large if "top_k" in source or "scatter-add" in source]


def test_nothing_is_compiled_twice(found):
    for name in RUNS:
        assert found[name]["compilations"] <= 5


# ---- what does not divide ----

SPEC = replace(
    MODELS["experts"],
    num_heads=12,
    num_kv_heads=6,
    vocab_size=480,
    tied_head=True,
    experts=ExpertsSpec(num_experts=6, num_active=2, d_expert=48),
)


@pytest.mark.parametrize(
    ("sizes", "option", "words"),
    [
        (MeshSizes(tensor=8), "ici_tensor_parallelism=8", ["heads (12)", "kv_heads (6)", "would do: 1, 2, 3, 6, 12"]),
        (MeshSizes(tensor=4, prefix="rollout"), "rollout_tensor_parallelism=4", ["kv_heads (6)"]),
        (MeshSizes(expert=4), "ici_expert_parallelism=4", ["experts (6)", "would do: 1, 2, 3, 6"]),
        (MeshSizes(fsdp=3), "ici_fsdp_parallelism=3", ["embed (128)", "would do: 1, 2, 4, 8"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_option_with_those_that_would_do(sizes, option, words):
    with pytest.raises(MeshError) as error:
        check_model(SPEC, sizes)
    for word in (option, *words):
        assert word in str(error.value)
    check_model(SPEC, MeshSizes(data=5, fsdp=4, expert=3, tensor=12))  # more devices than kv heads: copies
