"""`python handover_on_eight_devices.py DIRECTORY`: one layer out of a stack, from one mesh of 8 virtual devices to
another: what arrives, how it is split, and the largest result of a collective. Written as DIRECTORY/found.json;
XLA_FLAGS must ask for 8."""

import json
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from burnish.parallel import rules
from burnish.parallel.mesh import MeshSizes, make_mesh, on
from burnish.parallel.transfer import Piece, cutter, layout_on, relaid, way_to

MOVES = {
    "copies and fsdp to copies of tensor": (MeshSizes(data=2, fsdp=2, tensor=2), MeshSizes(data=2, tensor=4)),
    "fsdp to copies of tensor": (MeshSizes(data=2, fsdp=4), MeshSizes(data=4, tensor=2)),
    "all fsdp to copies of tensor": (MeshSizes(fsdp=8), MeshSizes(data=2, tensor=4)),
    "fsdp and tensor to tensor": (MeshSizes(fsdp=4, tensor=2), MeshSizes(tensor=8)),
    "experts to experts and tensor": (MeshSizes(fsdp=2, expert=4), MeshSizes(expert=2, tensor=4)),
    "all axes to experts and tensor": (MeshSizes(fsdp=2, expert=2, tensor=2), MeshSizes(expert=4, tensor=2)),
    "to copies": (MeshSizes(fsdp=4, tensor=2), MeshSizes(data=8)),
}
ARRAYS = {
    "matrix": (("embed", "mlp"), (64, 128)),
    "turned": (("mlp", "embed"), (128, 64)),
    "experts": (("experts", "embed", "mlp"), (8, 64, 32)),
    "norm": (("embed",), (64,)),
    "few heads": (("embed", "kv_heads", "head_dim"), (64, 2, 32)),  # whole where tensor is more than 2
}
LAYERS = 16


def move(sizes, axes, shape):
    source, target = (make_mesh(jax.devices(), s) for s in sizes)
    stack = np.random.default_rng(0).normal(size=(LAYERS, *shape)).astype(np.float32)
    held = jax.device_put(stack, rules.sharding(("layers", *axes), stack.shape, source))
    wanted = rules.sharding(axes, shape, target)
    (arrived,) = relaid([Piece("x", held, 5, wanted)], jnp.float32)
    way = way_to(layout_on(held.sharding, wanted), held.sharding, held.shape, True)
    with on(source):
        text = cutter(jnp.float32, (way,), summed=False).lower((held,), (np.int32(5),)).compile().as_text()
    kinds = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
    lines = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
    shapes = [s for line in lines for s in re.findall(r"\[([0-9,]*)\]", line)]
    return {
        "equal": bool((np.asarray(arrived) == stack[5]).all()),
        "split as wanted": arrived.sharding.is_equivalent_to(wanted, arrived.ndim),
        "part": math.prod(wanted.shard_shape(shape)),
        "layer": math.prod(shape),
        "largest": max((math.prod(int(n) for n in s.split(",") if n) for s in shapes), default=0),
    }


def main(directory):
    found = {
        move_name: {name: move(sizes, *array) for name, array in ARRAYS.items()} for move_name, sizes in MOVES.items()
    }
    (Path(directory) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
