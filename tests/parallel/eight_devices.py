"""`python eight_devices.py DIRECTORY`: what a tiny model computes on meshes of 8 virtual devices, written as
DIRECTORY/found.json.

A program of its own, because the number of devices is settled when JAX starts. XLA_FLAGS must ask for 8.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from tiny_rl import groups, update_options
from tiny_spec import TINY

from burnish.models import decoder
from burnish.models.params import head, init_params, param_shardings
from burnish.models.spec import ExpertsSpec
from burnish.parallel.mesh import MeshSizes, make_mesh, on
from burnish.plan import hlo
from burnish.rl.advantages import group_advantages
from burnish.rl.logprobs import selected_logprobs
from burnish.rl.optimizer import OptimizerOptions
from burnish.rl.packing import pack
from burnish.rl.schedule import LearningRate
from burnish.rl.update import Updater

DENSE = replace(TINY, d_model=128, d_mlp=256, vocab_size=512)
EXPERTS = replace(
    DENSE, family="mixtral", tied_head=False, experts=ExpertsSpec(num_experts=4, num_active=2, d_expert=128)
)
MODELS = {"dense": DENSE, "experts": EXPERTS}
MESHES = {
    "one": None,
    "data8": MeshSizes(data=8),
    "fsdp8": MeshSizes(fsdp=8),
    "fsdp4tensor2": MeshSizes(fsdp=4, tensor=2),
    "fsdp2tensor4": MeshSizes(fsdp=2, tensor=4),  # more devices than kv heads
    "fsdp2expert2tensor2": MeshSizes(fsdp=2, expert=2, tensor=2),
    "data2fsdp2tensor2": MeshSizes(data=2, fsdp=2, tensor=2),
    "data2fsdp2expert2": MeshSizes(data=2, fsdp=2, expert=2),
}
VALUES = {
    "dense": ("one", "data8", "fsdp8", "fsdp4tensor2", "fsdp2tensor4"),
    "experts": ("one", "fsdp2expert2tensor2"),
}
RUNS = {
    ("dense", "adamw"): ("one", "data8", "fsdp8", "fsdp4tensor2", "data2fsdp2tensor2"),
    ("dense", "adafactor"): ("one", "data8", "fsdp4tensor2", "fsdp2tensor4"),
    ("experts", "adamw"): ("one", "fsdp2expert2tensor2", "data2fsdp2expert2"),
    ("experts", "adafactor"): ("one", "fsdp2expert2tensor2"),
}
STEPS = 3


def mesh_of(name):
    sizes = MESHES[name]
    return make_mesh(jax.devices()[:1] if sizes is None else jax.devices(), sizes or MeshSizes())


def packed_rows(length=320, rows=8):
    """Rows of two segments (the second with two branches) and some padding, longer than what is computed whole."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, DENSE.vocab_size, (rows, length)).astype(np.int32)
    segments, branches, positions = (np.zeros((rows, length), np.int32) for _ in range(3))
    for row in range(rows):
        cut, end = 100 + 5 * row, length - 7 * row
        segments[row, :cut], segments[row, cut:end] = 1, 2
        positions[row, :cut], positions[row, cut:end] = np.arange(cut), np.arange(end - cut)
        branches[row, cut + 50 : cut + 90], branches[row, cut + 90 : end] = 1, 2
    targets = np.roll(tokens, -1, axis=1)
    return tokens, positions, segments, branches, targets


def values_and_gradients(spec, mesh):
    """Logits, the logprobs of the next tokens, and the gradient of their mean."""
    params = jax.device_put(init_params(spec, jax.random.key(0), std=0.1), param_shardings(spec, mesh))
    tokens, positions, segments, branches, targets = packed_rows()

    def f(params):
        hidden = decoder.forward(spec, params, tokens, positions, segments, branches)
        lp, _ = selected_logprobs(hidden, head(params), jnp.asarray(targets), jnp.int32(tokens.shape[1]), 1.0)
        real = segments != 0
        logits = jnp.where(real[..., None], decoder.unembed(spec, params, hidden), 0)
        return jnp.sum(jnp.where(real, lp, 0)) / np.sum(real), logits

    with on(mesh):
        (value, logits), gradients = jax.jit(jax.value_and_grad(f, has_aux=True))(params)
    return {"value": value, "logits": logits, "gradients": gradients}


def options(kind="adamw"):
    # A large eps: what is compared is arithmetic, not the sign of gradients that are 0 but for rounding.
    return update_options(
        optimizer=OptimizerOptions(LearningRate(1e-2, 0, 100), kind=kind, eps=1e-3, clip=1.0), remat="minimal"
    )


def train(spec, mesh, kind):
    """Losses, gradient norms and weights of three steps, and what the compiled programs look like."""
    updater = Updater(spec, options(kind), mesh)
    state, metrics, packed = steps(updater, init_params(spec, jax.random.key(0), std=0.1))
    with on(mesh):
        batch = updater._put(packed.micro_batches[0])
        gradients = updater._gradients.lower(state.params, batch, packed.denominators).compile()
        shapes = updater.gradient_shapes(state.params)
        update = updater._apply.lower(state, shapes).compile() if mesh.shape["data"] > 1 else None
    return state, metrics, facts(updater, state, batch, gradients, update, len(packed.micro_batches))


def exact_weights(spec, kind):
    """The weights after three steps, from the same float32 ones, computed in float64 on one device."""
    start = jax.tree.map(lambda x: np.asarray(x, np.float64), init_params(spec, jax.random.key(0), std=0.1))
    with jax.enable_x64(True), mock.patch.object(jnp, "float32", jnp.float64):
        double = replace(options(kind), dtype=jnp.float64, grad_dtype=jnp.float64)
        state, _, _ = steps(Updater(spec, double, mesh_of("one")), start)
        weights = jax.tree.map(np.asarray, state.params)
    assert {x.dtype for x in jax.tree.leaves(weights)} == {np.dtype(np.float64)}
    return weights


def steps(updater, params):
    """Three updates: the state, metrics and the last step's rows."""
    state = updater.init(params)
    rollouts = groups(6, seed=1, vocab_size=updater.spec.vocab_size, prompt_tokens=5, lengths=(3, 9, 23))
    # Several micro-batches also for copies of the weights that sum up their own.
    max_groups = 1 if updater.mesh.shape["data"] == 2 else 3
    metrics = []
    for step in range(STEPS):
        rewards = np.random.default_rng(step).integers(0, 2, (len(rollouts), 4)).astype(np.float64)
        valid = np.ones(rewards.shape, bool)
        packed = pack(
            rollouts, group_advantages(rewards, valid), valid, max_tokens=128, max_groups=max_groups, rows=updater.rows
        )
        state, found, _ = updater.step(state, packed)
        metrics.append({k: float(found[k]) for k in ("grad_norm", "entropy", "update_norm", "ratio_max")})
    return state, metrics, packed


def exchanged(compiled, mesh):
    """Every collective of a compiled program: kind, mesh axes, bytes, and the operation that it belongs to."""
    found = hlo.collectives(compiled.as_text(), dict(mesh.shape))
    return [[c.kind, c.axes, c.size, c.source] for c in found for _ in range(int(c.trips))]


def facts(updater, state, batch, gradients, update, micro_batches):
    """Sizes on a device in relation to the whole, collectives and the largest arrays of the compiled gradient, and
    what the compiled update of several copies of the weights exchanges and reuses."""
    split = {}
    for name, tree in (("params", state.params), ("moments", state.opt_state)):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            key = f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            split[key] = [list(x.shape), list(x.addressable_shards[0].data.shape)]
    text = gradients.as_text()
    collectives = {}
    for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
        lines = re.findall(rf"= (.*?) {kind}(?:-start)?\(", text)
        shapes = {shape for line in lines for shape in re.findall(r"\[([0-9,]*)\]", line)}
        collectives[kind] = sorted([int(n) for n in shape.split(",") if n] for shape in shapes)
    shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"f32\[([0-9,]+)\]", text)}
    about_update = {}
    if update is not None:
        memory = update.memory_analysis()
        about_update = {
            "update": exchanged(update, updater.mesh),
            "update_reuses": [memory.alias_size_in_bytes, memory.argument_size_in_bytes],
        }
    return about_update | {
        "gradients": exchanged(gradients, updater.mesh),
        "split": split,
        "collectives": collectives,
        "shapes": sorted(shapes),
        "rows": list(batch.tokens.shape),
        "micro_batches": micro_batches,
        "compilations": updater.num_compilations,
    }


def largest_difference(a, b):
    """Of the leaves, relative to each leaf's largest value."""
    return max(
        float(np.max(np.abs(np.asarray(x) - np.asarray(y))) / max(np.max(np.abs(np.asarray(y))), 1e-30))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def main(directory):
    found = {}
    for model, names in VALUES.items():
        reference = None
        for name in names:
            values = values_and_gradients(MODELS[model], mesh_of(name))
            reference = reference or values
            found[f"{model}/{name}/values"] = {k: largest_difference(values[k], reference[k]) for k in values}
    for (model, kind), names in RUNS.items():
        first = None
        exact = exact_weights(MODELS[model], kind) if kind == "adafactor" else None
        for name in names:
            state, metrics, about = train(MODELS[model], mesh_of(name), kind)
            first = first or (state, metrics)
            found[f"{model}/{name}/{kind}"] = {
                "metrics": metrics,
                "reference": first[1],
                "weights": largest_difference(state.params, first[0].params),
                "error": None if exact is None else largest_difference(state.params, exact),
                **about,
            }
    (Path(directory) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
