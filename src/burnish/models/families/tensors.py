"""Where a Hugging Face tensor lives in the parameter tree: one declaration, used in both directions.

Every difference between the two layouts is a reshape that splits or joins axes, then a transpose, and a place in a
stacked array. All have exact inverses, so import followed by export gives back the same bytes. Names are a table
from keys of the tree to names inside a layer; families change entries of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.models.params import ParamInfo, layer_infos, layer_place
from burnish.models.spec import ModelSpec


@dataclass(frozen=True)
class TensorMapping:
    """One Hugging Face tensor. `hf` reshaped to `split` and transposed by `order` is its part of the tree: the
    array at `path`, from which `index` (on the first axes) takes what is this tensor's.
    """

    name: str  # as in the safetensors file
    path: tuple[str, ...]  # keys of the parameter tree
    layer: int | None  # number of the layer it belongs to; None for arrays outside layers
    hf_shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    index: tuple[int | slice, ...] = ()

    def to_tree(self, hf: np.ndarray) -> np.ndarray:
        """hf_shape -> the shape of this tensor's part of the tree; a view where NumPy can give one."""
        return hf.reshape(self.split).transpose(self.order)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `to_tree`."""
        inverse = tuple(int(i) for i in np.argsort(self.order))
        return array.transpose(inverse).reshape(self.hf_shape)

    @property
    def row_unit(self) -> int:
        """`hf_rows` cuts the first axis into multiples of this many rows."""
        unit, joined = 1, self.split[0]
        for n in self.split[1:]:
            if joined == self.hf_shape[0]:
                break
            unit, joined = unit * n, joined * n
        return unit

    def hf_rows(self, array: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of `to_hf`, without making the rest of it."""
        inverse = tuple(int(i) for i in np.argsort(self.order))
        rows = array.transpose(inverse)[start // self.row_unit : -(-stop // self.row_unit)]
        return rows.reshape(stop - start, *self.hf_shape[1:])

    def slot(self, params: Any) -> Any:
        """This tensor's part of a parameter tree (of NumPy arrays: a view that can be written through)."""
        leaf = params
        for key in self.path:
            leaf = leaf[key]
        return leaf[self.index] if self.index else leaf


NAMES: dict[str, str] = {
    "input_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "router": "mlp.gate.weight",
}
"""Names inside a layer that most families share, by key of the tree."""

_MATRICES = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "router"}


@dataclass(frozen=True)
class ExpertNames:
    """Names of each expert's own tensors; `{}` stands for the expert's number."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class FusedExpertNames:
    """Names of the tensors that hold all experts: (E, 2F, D), the gates before the ups, and (E, D, F)."""

    gate_up: str
    down: str


def decoder_map(
    spec: ModelSpec,
    *,
    prefix: str = "model.",
    names: Mapping[str, str] | None = None,
    experts: ExpertNames | FusedExpertNames | None = None,
) -> list[TensorMapping]:
    """Every tensor of a decoder's checkpoint: embeddings, layers, final norm, head. `names` are the family's
    differences from NAMES."""
    table = NAMES | dict(names or {})
    V, D = spec.vocab_size, spec.d_model
    mappings = [TensorMapping(f"{prefix}embed_tokens.weight", ("embed",), None, (V, D), (V, D), (0, 1))]
    for i in range(spec.num_layers):
        place = layer_place(spec, i)
        index: tuple[int, ...] = () if place.index is None else (place.index,)
        for key, info in layer_infos(spec.at(i)).items():
            path = (*place.path, key)
            for name, shapes, part in _tensors(key, info, table, experts):
                mappings.append(TensorMapping(f"{prefix}layers.{i}.{name}", path, i, *shapes, (*index, *part)))
    mappings.append(TensorMapping(f"{prefix}norm.weight", ("final_norm",), None, (D,), (D,), (0,)))
    if not spec.tied_head:
        mappings.append(head_mapping(spec, "lm_head"))
    return mappings


def head_mapping(spec: ModelSpec, key: str) -> TensorMapping:
    """The output projection at `key` of the tree."""
    shape = (spec.vocab_size, spec.d_model)
    return TensorMapping("lm_head.weight", (key,), None, shape, shape, (0, 1))


_Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _tensors(
    key: str, info: ParamInfo, names: Mapping[str, str], experts: ExpertNames | FusedExpertNames | None
) -> list[tuple[str, _Shapes, tuple[int | slice, ...]]]:
    """The tensors that make up one array of a layer: name, (hf_shape, split, order), part of the array."""
    shape = info.shape
    if key == "expert_gate_up_proj":
        E, D, _, F = shape
        if isinstance(experts, FusedExpertNames):
            return [(experts.gate_up, ((E, 2 * F, D), (E, 2, F, D), (0, 3, 1, 2)), ())]
        assert experts is not None
        everything = slice(None)
        return [
            (name.format(e), ((F, D), (F, D), (1, 0)), (e, everything, half))
            for e in range(E)
            for half, name in enumerate((experts.gate, experts.up))
        ]
    if key == "expert_down_proj":
        E, F, D = shape
        if isinstance(experts, FusedExpertNames):
            return [(experts.down, ((E, D, F), (E, D, F), (0, 2, 1)), ())]
        assert experts is not None
        return [(experts.down.format(e), ((D, F), (D, F), (1, 0)), (e,)) for e in range(E)]
    return [(names[key], _shapes(key, shape), ())]


def _shapes(key: str, shape: tuple[int, ...]) -> _Shapes:
    """Hugging Face has matrices as (out, in) with head axes joined, the tree as (*in, *out)."""
    if key == "o_proj":
        H, N, D = shape
        return (D, H * N), (D, H, N), (1, 2, 0)
    if key in _MATRICES:
        D, *out = shape
        return (int(np.prod(out)), D), (*out, D), (len(out), *range(len(out)))
    return (int(np.prod(shape)),), shape, tuple(range(len(shape)))
