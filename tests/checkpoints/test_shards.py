"""A process reads of a checkpoint the rows that its devices hold, and they are the right ones; Hugging Face's layout
and MaxText's, there with chunks of single tensors and with chunks that span all layers."""

import jax
import numpy as np
import pytest
from family_variants import family_config, family_tensors
from llama_variants import write_checkpoint
from rich.console import Console

from burnish.checkpoints import shards, transfer
from burnish.checkpoints.convert_commands import convert
from burnish.checkpoints.hf_import import load_params
from burnish.checkpoints.hf_rows import RowReader
from burnish.checkpoints.orbax_files import OrbaxReader
from burnish.checkpoints.sources import load_maxtext
from burnish.config.schema import ConvertConfig
from burnish.models.families import spec_from_hf
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
    assert_parts_of(whole, spec, lambda shardings: load_params(directory, shardings=shardings)[1], monkeypatch)


def assert_parts_of(whole, spec, load, monkeypatch):
    """What is loaded with shardings is what they cut out of the whole, however arrays are split."""
    monkeypatch.setattr(shards, "array_of", lambda shape, sharding, parts: (sharding, list(parts.values())))

    def same(array, part):
        sharding, (found,) = part
        np.testing.assert_array_equal(array[sharding.index(array.shape)], found)

    for turn in range(5):
        parts = load(shardings(spec, turn))
        jax.tree.map(same, whole, parts, is_leaf=lambda x: isinstance(x, np.ndarray | tuple))


def test_rows_of_others_are_not_read(tmp_path, monkeypatch):
    config = family_config("qwen2")
    directory = write_checkpoint(tmp_path, config, family_tensors(config))
    read = []
    rows = RowReader.rows
    monkeypatch.setattr(
        RowReader, "rows", lambda self, name, a, b: read.append((name, b - a)) or rows(self, name, a, b)
    )
    spec, _ = load_params(directory)
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


# ---- MaxText ----


@pytest.fixture(params=[True, False], ids=["chunks-of-layers", "chunks-of-tensors"])
def maxtext(request, tmp_path, monkeypatch):
    """maxtext(name): the configuration of a model and its weights in MaxText's layout."""
    if not request.param:
        monkeypatch.setattr(transfer, "SMALL_LEAF_BYTES", 0)
        monkeypatch.setattr(transfer, "PIECE_BYTES", 5000)

    def write(name):
        config = family_config(name)
        source = write_checkpoint(tmp_path, config, family_tensors(config))
        asked = ConvertConfig(source=str(source), destination=str(tmp_path / "mt"), to="maxtext")
        return config, convert(asked, Console(quiet=True))

    return write


@pytest.mark.parametrize("name", ["mixtral", "gemma4_experts", "qwen2"])
def test_every_part_of_a_maxtext_checkpoint_is_that_of_the_whole(name, maxtext, monkeypatch):
    config, items = maxtext(name)
    whole = load_maxtext(str(items), config, np.float32)
    spec = spec_from_hf(config)
    assert_parts_of(whole, spec, lambda sh: load_maxtext(str(items), config, np.float32, shardings=sh), monkeypatch)


def test_chunks_of_others_are_not_read(maxtext, monkeypatch):
    """Half of the layers, of the vocabulary and of the last norm."""
    config, items = maxtext("mixtral")
    read, done = [], []
    of = OrbaxReader.read

    def reading(*arguments):
        read.append(of(*arguments))
        return read[-1]

    monkeypatch.setattr(OrbaxReader, "read", reading)
    load_maxtext(str(items), config, np.float32)
    everything = sum(array.nbytes for array in read)
    read.clear()
    monkeypatch.setattr(shards, "array_of", lambda shape, sharding, parts: sharding)
    infos = param_infos(spec_from_hf(config))
    by_first_axis = jax.tree.map(lambda _: OneOf(0, 0), infos, is_leaf=lambda x: isinstance(x, ParamInfo))
    load_maxtext(str(items), config, np.float32, lambda *now: done.append(now), by_first_axis)
    assert sum(array.nbytes for array in read) == everything // 2
    assert done[-1][0] == done[-1][1]
