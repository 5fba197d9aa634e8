"""The parameter tree of a ModelSpec: which arrays exist, their shapes and their logical axes.

Parameters are nested dicts of plain arrays. Layers of the same kind are stacked on a leading axis ("layers"), which
training scans over: "layers" holds the stacks themselves where there is one kind, and one such dict per position
of the pattern, "0", "1", …, where there are several; "tail" then holds the layers after the last whole pattern,
unstacked. `layer_place` says where a layer is.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from burnish.models.spec import ModelSpec
from burnish.parallel import rules

Params = dict[str, Any]
Init = Literal["normal", "output", "ones", "zeros"]


@dataclass(frozen=True)
class ParamInfo:
    """One array of the tree: its shape and each axis's logical name (parallel/ maps names to mesh axes)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init = "normal"
    """How it starts: "output" matrices write to the residual stream."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class LayerPlace:
    """Where the arrays of one layer are: under `path`, at `index` of their stacked axis (None: not stacked)."""

    path: tuple[str, ...]
    index: int | None


def layer_infos(spec: ModelSpec) -> dict[str, ParamInfo]:
    """The arrays of one layer (a spec without pattern: `ModelSpec.at`), without the stacked axis.

    `input_norm` is before attention, `post_attention_norm` before the MLP, as Llama calls them; the norms on what
    the two add to the residual stream are `attention_output_norm` and `mlp_output_norm`.
    """
    D, H, K, N, F = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.d_mlp
    norm: Init = "zeros" if spec.norm_offset else "ones"
    infos = {
        "input_norm": ParamInfo((D,), ("width",), norm),
        "q_proj": ParamInfo((D, H, N), ("embed", "heads", "head_dim")),
        "k_proj": ParamInfo((D, K, N), ("embed", "kv_heads", "head_dim")),
        "v_proj": ParamInfo((D, K, N), ("embed", "kv_heads", "head_dim")),
        "o_proj": ParamInfo((H, N, D), ("heads", "head_dim", "embed"), "output"),
        "post_attention_norm": ParamInfo((D,), ("width",), norm),
    }
    if spec.keys_are_values:
        del infos["v_proj"]
    if spec.qk_norm:
        infos["q_norm"] = ParamInfo((N,), ("head_dim",), norm)
        infos["k_norm"] = ParamInfo((N,), ("head_dim",), norm)
    experts = spec.experts
    if experts is None or experts.beside_mlp:
        infos["gate_proj"] = ParamInfo((D, F), ("embed", "mlp"))
        infos["up_proj"] = ParamInfo((D, F), ("embed", "mlp"))
        infos["down_proj"] = ParamInfo((F, D), ("mlp", "embed"), "output")
    if spec.attention_bias:
        infos["q_bias"] = ParamInfo((H, N), ("heads", "head_dim"), "zeros")
        infos["k_bias"] = ParamInfo((K, N), ("kv_heads", "head_dim"), "zeros")
        infos["v_bias"] = ParamInfo((K, N), ("kv_heads", "head_dim"), "zeros")
    if spec.output_bias:
        infos["o_bias"] = ParamInfo((D,), ("width",), "zeros")
    if spec.mlp_bias:
        infos["gate_bias"] = ParamInfo((F,), ("mlp",), "zeros")
        infos["up_bias"] = ParamInfo((F,), ("mlp",), "zeros")
        infos["down_bias"] = ParamInfo((D,), ("width",), "zeros")
    if spec.output_norms:
        infos["attention_output_norm"] = ParamInfo((D,), ("width",), norm)
        infos["mlp_output_norm"] = ParamInfo((D,), ("width",), norm)
    if experts is not None:
        E, Fe = experts.num_experts, experts.d_expert
        infos["router"] = ParamInfo((D, E), ("embed", "routes"))
        infos["expert_gate_up_proj"] = ParamInfo((E, D, 2, Fe), ("experts", "embed", "gate_up", "mlp"))
        infos["expert_down_proj"] = ParamInfo((E, Fe, D), ("experts", "mlp", "embed"), "output")
        if experts.beside_mlp:
            infos["router_scale"] = ParamInfo((D,), ("width",), "ones")
            infos["expert_scale"] = ParamInfo((E,), ("routes",), "ones")
            infos["expert_norm"] = ParamInfo((D,), ("width",), norm)
            infos["expert_output_norm"] = ParamInfo((D,), ("width",), norm)
            infos["dense_output_norm"] = ParamInfo((D,), ("width",), norm)
    if spec.layer_scalar:
        infos["layer_scalar"] = ParamInfo((1,), ("one",), "ones")
    return infos


def layer_place(spec: ModelSpec, layer: int) -> LayerPlace:
    """Where layer `layer` of 0 … L - 1 is in the tree."""
    size = len(spec.pattern)
    block, position = divmod(layer, size)
    if size == 1:
        return LayerPlace(("layers",), layer)
    if block == spec.num_layers // size:
        return LayerPlace(("tail", str(position)), None)
    return LayerPlace(("layers", str(position)), block)


def param_infos(spec: ModelSpec) -> Params:
    """The whole tree with a ParamInfo at each leaf: {"embed", "layers": {...}, "final_norm"[, "tail", "lm_head"]}."""
    D, V, size = spec.d_model, spec.vocab_size, len(spec.pattern)
    blocks, rest = divmod(spec.num_layers, size)

    def stack(position: int) -> dict[str, ParamInfo]:
        return {
            name: ParamInfo((blocks, *info.shape), ("layers", *info.axes), info.init)
            for name, info in layer_infos(spec.at(position)).items()
        }

    tree: Params = {
        "embed": ParamInfo((V, D), ("vocab", "embed")),
        "layers": stack(0) if size == 1 else {str(i): stack(i) for i in range(size) if blocks},
        "final_norm": ParamInfo((D,), ("width",), "zeros" if spec.norm_offset else "ones"),
    }
    if rest:
        tree["tail"] = {str(i): layer_infos(spec.at(i)) for i in range(rest)}
    if not spec.tied_head:
        tree["lm_head"] = ParamInfo((V, D), ("vocab", "embed"))
    return tree


def init_params(spec: ModelSpec, key: jax.Array, dtype: Any = np.float32, std: float = 0.02) -> Params:
    """Random parameters: norms one, biases zero, matrices normal(0, std) (GPT-2's initialisation), those that write
    to the residual stream scaled by 1/sqrt(2L).
    """
    leaves, treedef = jax.tree.flatten(param_infos(spec), is_leaf=lambda x: isinstance(x, ParamInfo))
    arrays = []
    for i, info in enumerate(leaves):
        if info.init == "ones":
            arrays.append(jax.numpy.ones(info.shape, dtype))
        elif info.init == "zeros":
            arrays.append(jax.numpy.zeros(info.shape, dtype))
        else:
            scale = std / np.sqrt(2 * spec.num_layers) if info.init == "output" else std
            arrays.append((scale * jax.random.normal(jax.random.fold_in(key, i), info.shape)).astype(dtype))
    return jax.tree.unflatten(treedef, arrays)


def param_shardings(spec: ModelSpec, mesh: Mesh) -> Params:
    """The NamedSharding of each array on `mesh`. Raises MeshError where a size does not divide."""
    return jax.tree.map(
        lambda info: rules.sharding(info.axes, info.shape, mesh),
        param_infos(spec),
        is_leaf=lambda x: isinstance(x, ParamInfo),
    )


def num_params(spec: ModelSpec) -> int:
    """Number of parameters N of the model (a tied head counts once)."""
    return sum(i.size for i in jax.tree.leaves(param_infos(spec), is_leaf=lambda x: isinstance(x, ParamInfo)))


def head(params: Params) -> jax.Array:
    """The matrix (V, D) of the output projection: the embeddings where they are tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]
