"""Is an exported directory the model that was trained? Checked on the files as they lie on disk.

Names, shapes, dtypes and the index; every tensor against the parameters, bit by bit after the cast;
config.json against the source's; and, because a right tensor under a wrong config is a wrong model, logits
on a probe batch. Layers are read one at a time. Generation is not tried, and no other library is asked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_import import check_headers, read_json
from burnish.checkpoints.safetensors_file import DTYPES, few, iterate, list_tensors, open_file
from burnish.models.attention import packed_attention
from burnish.models.decoder import embed, layer, norm, unembed
from burnish.models.families import TensorMapping, spec_from_hf, tensor_map, tied_head_copy
from burnish.models.params import Params, layer_infos, layer_place
from burnish.models.rope import rope_tables
from burnish.models.spec import ModelSpec

LOGIT_TOLERANCE = 1e-5
"""Largest relative difference ‖a - b‖ / ‖b‖ of float32 logits between the exported files and the trained
weights rounded as the files are: both run the same programs, so nothing but noise may differ."""


@dataclass(frozen=True)
class Verification:
    """What was found to be right, and the one thing that is a matter of degree."""

    num_tensors: int
    rounding_error: float
    """Relative difference ‖a - b‖ / ‖b‖ of the logits from those of the weights before they were rounded to
    the dtypes of the file: 0 where none is narrower, about 0.01 for bfloat16."""


def verify(
    directory: Path | str,
    spec: ModelSpec,
    params: Params,
    source_config: Path | str,
    dtypes: Mapping[str, str],
) -> Verification:
    """Verify an export of `params`; `dtypes` has each tensor that must be there and its safetensors dtype.

    Raises CheckpointError naming the tensor, file or field that is wrong.
    """
    directory = Path(directory)
    stored = list_tensors(directory)
    check_headers(directory, spec, stored)
    found = {t.name: t.dtype for t in stored}
    for name in sorted(set(dtypes) | set(found)):
        if dtypes.get(name) != found.get(name):
            raise CheckpointError(
                f"{directory}: {name} is {found.get(name, 'not there')}, {dtypes.get(name, 'not there')} was asked for"
            )
    _verify_config(directory, spec, Path(source_config))

    head = tied_head_copy(spec)
    mappings = {m.name: m for m in tensor_map(spec) + ([] if head is None else [head])}
    for tensor, array in iterate(stored):
        want = mappings[tensor.name].to_hf(np.asarray(mappings[tensor.name].slot(params))).astype(DTYPES[tensor.dtype])
        if not np.isfinite(array).all():
            raise CheckpointError(f"{tensor.file}: {tensor.name} holds NaN or infinity")
        if not np.array_equal(array, want):
            worst = np.abs(array.astype(np.float32) - want.astype(np.float32)).max()
            raise CheckpointError(f"{tensor.file}: {tensor.name} differs from the trained weights by up to {worst:.3g}")

    files = {t.name: t.file for t in stored}

    def from_file(mapping: TensorMapping) -> np.ndarray:
        with open_file(files[mapping.name]) as get:
            return mapping.to_tree(get(mapping.name))

    def rounded(mapping: TensorMapping) -> np.ndarray:
        return np.asarray(mapping.slot(params)).astype(DTYPES[found[mapping.name]])

    exported = probe_logits(spec_from_hf(read_json(directory / "config.json")), from_file)
    trained = probe_logits(spec, rounded)
    if not np.isfinite(trained).all():
        raise CheckpointError(
            f"{directory}: the trained model's own logits are not finite, although its weights are: training has "
            "ruined it; export an earlier checkpoint"
        )
    difference = _relative(exported, trained)
    if not difference <= LOGIT_TOLERANCE:
        raise CheckpointError(
            f"{directory}: logits of the exported model differ from the trained model's by {difference:.2g} "
            f"(relative; {LOGIT_TOLERANCE:.2g} is allowed), although each tensor is right"
        )
    rounding_error = _relative(exported, probe_logits(spec, lambda mapping: mapping.slot(params)))
    return Verification(len(stored), rounding_error)


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _verify_config(directory: Path, spec: ModelSpec, source_config: Path) -> None:
    source, exported = read_json(source_config), read_json(directory / "config.json")
    differ = [
        field
        for field in sorted(set(source) | set(exported))
        if field not in ("torch_dtype", "dtype") and source.get(field) != exported.get(field)
    ]
    if differ:
        raise CheckpointError(f"{directory / 'config.json'} differs from the source's in {few(differ)}")
    if spec_from_hf(exported) != spec:
        raise CheckpointError(f"{directory / 'config.json'} describes another model than was trained")


@partial(jax.jit, static_argnums=0)
def _layer(spec: ModelSpec, p: Params, x: jax.Array, positions: jax.Array) -> jax.Array:
    ones = jnp.ones_like(positions)
    rope = rope_tables(spec.rope, spec.head_dim, positions)
    return layer(spec, p, x, rope, packed_attention(spec, ones, ones, positions))[0]


def probe_logits(spec: ModelSpec, array_of: Callable[[TensorMapping], Any]) -> np.ndarray:
    """Logits (2, 16, V) float32 of two fixed random sequences, one layer of weights in memory at a time.
    `array_of` gives the tree's array for a tensor.
    """
    B, T = 2, 16
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, spec.vocab_size, (B, T)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    mappings = tensor_map(spec)

    def outside_layers(*keys: str) -> Params:
        return {
            m.path[0]: jnp.asarray(array_of(m), jnp.float32) for m in mappings if m.layer is None and m.path[0] in keys
        }

    def of_layer(i: int) -> Params:
        arrays: Params = {}
        infos, stacked = layer_infos(spec.at(i)), layer_place(spec, i).index is not None
        for m in mappings:
            if m.layer != i:
                continue
            key, part = m.path[-1], m.index[1:] if stacked else m.index
            if part:  # one of several tensors of an array: experts
                arrays.setdefault(key, np.empty(infos[key].shape, np.float32))[part] = array_of(m)
            else:
                arrays[key] = jnp.asarray(array_of(m), jnp.float32)
        return arrays

    x = embed(spec, outside_layers("embed"), tokens, jnp.float32)
    for i in range(spec.num_layers):
        x = _layer(spec.at(i), of_layer(i), x, positions)
    x = norm(spec, x, outside_layers("final_norm")["final_norm"])
    return np.asarray(unembed(spec, outside_layers("embed", "lm_head"), x))
