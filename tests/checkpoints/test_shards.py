"""A process reads of a checkpoint the rows that its devices hold, and they are the right ones."""

import jax
import numpy as np
import pytest
from family_variants import family_config, family_tensors
from llama_variants import write_checkpoint

from burnish.checkpoints import shards
from burnish.checkpoints.hf_import import load_params
from burnish.checkpoints.hf_rows import RowReader
from burnish.models.params import ParamInfo, param_infos


class OneOf:
    """Stands for the sharding of a process that holds one part of two along one axis of an array."""

    def __init__(self, axis, which):
        self.axis, self.which = axis, which

    def index(self, shape):
        index = [slice(None)] * len(shape)
        half = shape[self.axis] // 2
        index[self.axis] = slice(0, half) if self.which == 0 else slice(half, None)
        return tuple(index)

    def addressable_devices_indices_map(self, shape):
        return {"device": self.index(shape)}


def shardings(spec, turn):
    """Each array split along another of the axes that can be halved, the first or the second half."""
    infos, treedef = jax.tree.flatten(param_infos(spec), is_leaf=lambda x: isinstance(x, ParamInfo))
    chosen = []
    for i, info in enumerate(infos):
        axes = [axis for axis, n in enumerate(info.shape) if n % 2 == 0] or None
        chosen.append(OneOf(axes[(i + turn) % len(axes)], (i + turn // 3) % 2) if axes else OneOf(0, 1))
    return jax.tree.unflatten(treedef, chosen)


@pytest.mark.parametrize("name", ["mixtral", "gemma4_experts", "qwen2"])
def test_every_part_is_that_of_the_whole(name, tmp_path, monkeypatch):
    config = family_config(name)
    directory = write_checkpoint(tmp_path, config, family_tensors(config))
    spec, whole = load_params(directory)
    monkeypatch.setattr(shards, "array_of", lambda shape, sharding, parts: (sharding, list(parts.values())))
    for turn in range(5):
        _, parts = load_params(directory, shardings=shardings(spec, turn))

        def same(array, part):
            sharding, (found,) = part
            np.testing.assert_array_equal(array[sharding.index(array.shape)], found)

        jax.tree.map(same, whole, parts, is_leaf=lambda x: isinstance(x, np.ndarray | tuple))


def test_rows_of_others_are_not_read(tmp_path, monkeypatch):
    config = family_config("qwen2")
    directory = write_checkpoint(tmp_path, config, family_tensors(config))
    read = []
    rows = RowReader.rows
    monkeypatch.setattr(
        RowReader, "rows", lambda self, name, a, b: read.append((name, b - a)) or rows(self, name, a, b)
    )
    spec, whole = load_params(directory)
    everything = dict(read)
    read.clear()
    monkeypatch.setattr(shards, "array_of", lambda shape, sharding, parts: sharding)
    infos = param_infos(spec)
    by_layer = jax.tree.map(lambda _: OneOf(0, 0), infos, is_leaf=lambda x: isinstance(x, ParamInfo))
    load_params(directory, shardings=by_layer)
    half = dict(read)
    assert half["model.embed_tokens.weight"] == everything["model.embed_tokens.weight"] // 2
    layers = [n for name, n in half.items() if ".layers." in name]
    assert layers.count(0) == len(layers) // 2  # of two layers this process has the first
