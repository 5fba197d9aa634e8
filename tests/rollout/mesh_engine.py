"""`python mesh_engine.py DIRECTORY`: what the engine samples on meshes of 8 virtual devices, written as
DIRECTORY/found.json.

A program of its own, because the number of devices is settled when JAX starts. XLA_FLAGS must ask for 8.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from rollout_reference import TINY, decode_text, make_prompt, random_params

from burnish.models.params import param_shardings
from burnish.models.spec import ExpertsSpec, LayerKind
from burnish.parallel.errors import MeshError
from burnish.parallel.mesh import MeshSizes, make_mesh
from burnish.rollout import decode
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import SamplingParams

DENSE = replace(TINY, num_heads=8, num_kv_heads=2)
MODELS = {
    "dense": DENSE,
    "window": replace(DENSE, pattern=(LayerKind(window=8), LayerKind())),
    "experts": replace(DENSE, tied_head=False, experts=ExpertsSpec(num_experts=4, num_active=2, d_expert=32)),
}
MESHES = {
    "one": MeshSizes(),
    "data8": MeshSizes(data=8),
    "data2tensor4": MeshSizes(data=2, tensor=4),  # more devices than kv heads
    "data2expert2tensor2": MeshSizes(data=2, expert=2, tensor=2),
}
RUNS = {
    "dense": ("one", "data8"),
    "window": ("one", "data2tensor4"),
    "experts": ("one", "data2expert2tensor2"),
}
STOPS = (3, 70, 11)
SAMPLINGS = {
    "greedy": SamplingParams(max_total_tokens=90, temperature=0.0, stop_token_ids=STOPS),
    "sampled": SamplingParams(max_total_tokens=90, temperature=0.7, top_k=20, top_p=0.9, stop_token_ids=STOPS),
}
PROMPTS = [make_prompt(n, seed=i) for i, n in enumerate((5, 1, 30, 17, 2, 9))]
SEEDS = [[100 * p + g for g in range(4)] for p in range(len(PROMPTS))]
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def mesh_of(name):
    sizes = MESHES[name]
    return make_mesh(jax.devices()[: 1 if name == "one" else 8], sizes)


def collectives(text):
    """(kind, numbers of elements) of the collectives in a compiled program's text."""
    found = []
    for shapes, kind in COLLECTIVE.findall(text):
        sizes = [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"\[([\d,]*)\]", shapes)]
        found.append((kind, max(int(np.prod(s)) for s in sizes)))
    return found


class Watched:
    """`decode.decode_chunk`, its first call's compiled text and the caches it was called with kept."""

    def __init__(self):
        self.function, self.text, self.parts = decode.decode_chunk, None, None

    def __call__(self, spec, view, lanes, lane_lengths, own, *rest, **options):
        if self.text is None:
            lowered = self.function.lower(spec, view, lanes, lane_lengths, own, *rest, **options)
            self.text = lowered.compile().as_text()
            arrays = {"view": view, "lanes": lanes, "own": own}
            self.parts = {name: part_of_one_device(tree) for name, tree in arrays.items()}
        return self.function(spec, view, lanes, lane_lengths, own, *rest, **options)


def part_of_one_device(tree):
    """The largest share of all elements that one device has."""
    total, held = 0, {}
    for x in jax.tree.leaves(tree):
        total += x.size
        for shard in x.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.size
    return max(held.values()) / total


def sample(spec, name):
    mesh = mesh_of(name)
    engine = BuiltinEngine(
        spec, decode_text, max_slots=16, max_prompt_tokens=32, max_total_tokens=90, dtype="float32", mesh=mesh
    )
    params = random_params(spec, 0)
    if mesh.size > 1:  # as a trainer has them, its devices in another order
        trainer = make_mesh(jax.devices()[::-1], MeshSizes(fsdp=8))
        params = jax.device_put(params, param_shardings(spec, trainer))
    moved = engine.load_weights(params, 3)
    decode.decode_chunk = watched = Watched()
    try:
        result = {
            way: [
                {"ids": c.token_ids.tolist(), "logprobs": c.logprobs.tolist(), "reason": str(c.stop_reason)}
                for group in engine.generate(PROMPTS, SEEDS, sampling)
                for c in group.completions
            ]
            for way, sampling in SAMPLINGS.items()
        }
        compilations = engine.num_compilations
        engine.generate(PROMPTS[::-1], SEEDS[::-1], SAMPLINGS["sampled"])
    finally:
        decode.decode_chunk = watched.function
    return result | {
        "moved": moved,
        "parts": watched.parts,
        "collectives": collectives(watched.text),
        "compiled_later": engine.num_compilations - compilations,
    }


def refusals():
    """What is said where the model does not fit the mesh."""
    found = {}
    for axis, sizes in {"heads": MeshSizes(tensor=8), "experts": MeshSizes(expert=8)}.items():
        spec = replace(DENSE, num_heads=4) if axis == "heads" else MODELS["experts"]
        try:
            BuiltinEngine(
                spec, decode_text, max_slots=4, max_prompt_tokens=8, max_total_tokens=16, dtype="float32",
                mesh=make_mesh(jax.devices(), sizes),
            )  # fmt: skip
            found[axis] = ""
        except MeshError as error:
            found[axis] = str(error)
    return found


def main(directory):
    found = {f"{model}/{name}": sample(MODELS[model], name) for model, names in RUNS.items() for name in names}
    (Path(directory) / "found.json").write_text(json.dumps(found | {"refusals": refusals()}))


if __name__ == "__main__":
    main(sys.argv[1])
