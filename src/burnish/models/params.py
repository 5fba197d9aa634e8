"""The parameter tree of a ModelSpec: which arrays exist, their shapes and their logical axes.

Parameters are nested dicts of plain arrays. The arrays of all layers are stacked on a leading axis L
("layers"), which training scans over; `unstack_layers` gives the per-layer view that decoding on CPU wants.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from burnish.models.spec import ModelSpec

Params = dict[str, Any]


@dataclass(frozen=True)
class ParamInfo:
    """One array of the tree: its shape and each axis's logical name (parallel/ maps names to mesh axes)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


def layer_infos(spec: ModelSpec) -> dict[str, ParamInfo]:
    """The arrays of one layer, without the stacked axis."""
    D, H, K, N, F = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.d_mlp
    infos = {
        "input_norm": ParamInfo((D,), ("embed",)),
        "q_proj": ParamInfo((D, H, N), ("embed", "heads", "head_dim")),
        "k_proj": ParamInfo((D, K, N), ("embed", "kv_heads", "head_dim")),
        "v_proj": ParamInfo((D, K, N), ("embed", "kv_heads", "head_dim")),
        "o_proj": ParamInfo((H, N, D), ("heads", "head_dim", "embed")),
        "post_attention_norm": ParamInfo((D,), ("embed",)),
        "gate_proj": ParamInfo((D, F), ("embed", "mlp")),
        "up_proj": ParamInfo((D, F), ("embed", "mlp")),
        "down_proj": ParamInfo((F, D), ("mlp", "embed")),
    }
    if spec.attention_bias:
        infos["q_bias"] = ParamInfo((H, N), ("heads", "head_dim"))
        infos["k_bias"] = ParamInfo((K, N), ("kv_heads", "head_dim"))
        infos["v_bias"] = ParamInfo((K, N), ("kv_heads", "head_dim"))
        infos["o_bias"] = ParamInfo((D,), ("embed",))
    if spec.mlp_bias:
        infos["gate_bias"] = ParamInfo((F,), ("mlp",))
        infos["up_bias"] = ParamInfo((F,), ("mlp",))
        infos["down_bias"] = ParamInfo((D,), ("embed",))
    return infos


def param_infos(spec: ModelSpec) -> Params:
    """The whole tree with a ParamInfo at each leaf: {"embed", "layers": {...}, "final_norm"[, "lm_head"]}."""
    L, D, V = spec.num_layers, spec.d_model, spec.vocab_size
    tree: Params = {
        "embed": ParamInfo((V, D), ("vocab", "embed")),
        "layers": {
            name: ParamInfo((L, *info.shape), ("layers", *info.axes))
            for name, info in layer_infos(spec).items()
        },
        "final_norm": ParamInfo((D,), ("embed",)),
    }
    if not spec.tied_head:
        tree["lm_head"] = ParamInfo((V, D), ("vocab", "embed"))
    return tree


def init_params(spec: ModelSpec, key: jax.Array, dtype: Any = np.float32, std: float = 0.02) -> Params:
    """Random parameters: norms one, biases zero, matrices normal(0, std) (GPT-2's initialisation),
    `o_proj` and `down_proj` scaled by 1/sqrt(2L).
    """
    infos = param_infos(spec)
    leaves, treedef = jax.tree.flatten(infos, is_leaf=lambda x: isinstance(x, ParamInfo))
    paths = [
        jax.tree_util.keystr(p)
        for p, _ in jax.tree.leaves_with_path(infos, is_leaf=lambda x: isinstance(x, ParamInfo))
    ]
    arrays = []
    for i, (path, info) in enumerate(zip(paths, leaves, strict=True)):
        if "norm" in path:
            arrays.append(jax.numpy.ones(info.shape, dtype))
        elif "bias" in path:
            arrays.append(jax.numpy.zeros(info.shape, dtype))
        else:
            scale = std / np.sqrt(2 * spec.num_layers) if "o_proj" in path or "down_proj" in path else std
            arrays.append((scale * jax.random.normal(jax.random.fold_in(key, i), info.shape)).astype(dtype))
    return jax.tree.unflatten(treedef, arrays)


def num_params(spec: ModelSpec) -> int:
    """Number of parameters N of the model (a tied head counts once)."""
    return sum(i.size for i in jax.tree.leaves(param_infos(spec), is_leaf=lambda x: isinstance(x, ParamInfo)))


def unstack_layers(params: Params) -> Params:
    """The same tree with "layers" as a list of L dicts of separate arrays."""
    L = jax.tree.leaves(params["layers"])[0].shape[0]
    return {**params, "layers": [jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(L)]}
