"""Which MaxText leaf holds which Hugging Face tensor, and what lies between them: one table per family, used
in both directions.

A family lists what one decoder layer has; a list of places says where layers lie in MaxText's tree (one by
one, stacked, or stacked by blocks of local and global layers). Everything between the two layouts is a
transpose, a reordering of rows for interleaved rotary embedding, a factor or a shift. Only text decoders
are covered, and of each family only what MaxText itself has.

Sources: MaxText 0.2.5's conversion tables and the checkpoints that its tools write.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from burnish.checkpoints.errors import CheckpointError


@dataclass(frozen=True)
class Factor:
    """A product that MaxText takes in float32 before it rounds to the weights' dtype: `times` towards
    MaxText; back with `back_times`, or divided by `times` where that is None."""

    times: float
    back_times: float | None = None


@dataclass(frozen=True)
class Item:
    """One leaf of a layer (or of the whole model) and its Hugging Face tensor.

    `shape` is the leaf's without stacked axes. With `transpose` the tensor (R, C) becomes (C, R) before it
    is reshaped; a leading axis E that both have stays ("batched"). `half` says which half of the tensor's
    second axis is meant, where two leaves share one fused tensor. With `rope` the rows of each head are
    reordered from half-split to interleaved pairs. `num_experts` is set where the tensor name has a
    `{expert}` and the leaf stacks the experts on its first axis.
    """

    leaf: str
    tensor: str
    hf_shape: tuple[int, ...]
    shape: tuple[int, ...]
    transpose: bool = False
    rope: bool = False
    half: int | None = None
    factor: Factor | None = None
    shift: float = 0.0
    num_experts: int | None = None

    @property
    def batched(self) -> bool:
        return self.transpose and len(self.hf_shape) == 3

    @property
    def row_axis(self) -> int:
        """The axis of `shape` along which the tensor's first axis runs."""
        if not self.transpose or self.batched:
            return 0
        axis, before = 0, 1
        while before < self.hf_shape[1]:
            before *= self.shape[axis]
            axis += 1
        return axis

    @property
    def rows_per_index(self) -> int:
        """Rows of the tensor for one index of `row_axis`."""
        return self.hf_shape[0] // self.shape[self.row_axis]


@dataclass(frozen=True)
class Member:
    """One Hugging Face tensor (or half of it) in a leaf: `index` on the leaf's stacked axes."""

    tensor: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """One array of MaxText's tree: its dotted name below `params`, shape, stacked axes, members."""

    name: str
    shape: tuple[int, ...]
    stacked: tuple[int, ...]
    item: Item
    members: tuple[Member, ...]

    @property
    def row_axis(self) -> int:
        """The axis of the whole leaf along which the rows of its tensors run."""
        free = [axis for axis in range(len(self.shape)) if axis not in self.stacked]
        return free[self.item.row_axis]


@dataclass(frozen=True)
class Place:
    """Layers of the model at one place of the tree; `layers` is an array of layer numbers whose axes are
    the leaf's stacked ones (no axis: a single layer)."""

    prefix: str
    layers: np.ndarray


@dataclass(frozen=True)
class Family:
    """A model as MaxText lays it out: where its layers are, and what a layer and the model around it have.

    `layer_names` is the Hugging Face prefix of a layer with `{layer}`.
    """

    num_layers: int
    layer_names: str
    layer_items: Callable[[int], list[Item]]
    outer_items: list[Item]
    scanned_places: list[Place]


def family_of(config: Mapping[str, Any]) -> Family:
    """The layout of a config.json. Raises CheckpointError for what MaxText has no layout for."""
    kind = config.get("model_type")
    make = _FAMILIES.get(str(kind))
    if make is None:
        raise CheckpointError(
            f"config.json: model_type is {kind!r}; MaxText layouts are known of {', '.join(sorted(_FAMILIES))}"
        )
    text = config.get("text_config", config)
    for field in ("attention_bias", "mlp_bias"):
        if text.get(field):
            raise CheckpointError(f"config.json: {field} is true; MaxText's layers have no such biases")
    try:
        return make(config)
    except KeyError as error:
        raise CheckpointError(f"config.json lacks {error.args[0]}, which the conversion needs") from None


def leaves(family: Family, scanned: bool) -> list[Leaf]:
    """Every parameter leaf of the tree, in the order in which the tensors are asked for."""
    found = [_leaf("", item, Place("", np.array(0)), "") for item in family.outer_items]
    for place in family.scanned_places if scanned else _one_by_one(family.num_layers):
        for item in family.layer_items(int(place.layers.flat[0])):
            found.append(_leaf(f"{place.prefix}.", item, place, family.layer_names))
    return found


def hf_tensors(found: list[Leaf]) -> dict[str, tuple[int, ...]]:
    """The Hugging Face tensors of the leaves, with shapes, layers in ascending order."""
    shapes = {m.tensor: leaf.item.hf_shape for leaf in found for m in leaf.members}
    return dict(sorted(shapes.items(), key=lambda entry: _natural(entry[0])))


def _natural(name: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Embeddings, then layers by number, then what follows them."""
    parts = name.split(".")
    first = 0 if "embed_tokens" in parts else 1 if "layers" in parts else 2
    return first, [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]


def _leaf(prefix: str, item: Item, place: Place, layer_names: str) -> Leaf:
    """Stacked axes come second in a leaf (MaxText's param_scan_axis 1), after the experts where those are
    stacked from separate tensors."""
    layers = place.layers
    names = [
        (tuple(int(i) for i in index), layer_names.format(layer=int(layer)) + item.tensor)
        for index, layer in np.ndenumerate(layers)
    ]
    if item.num_experts is None:
        at = 1 if layers.ndim else 0
        shape = (*item.shape[:at], *layers.shape, *item.shape[at:])
        stacked = tuple(range(at, at + layers.ndim))
        members = [Member(name, index) for index, name in names]
    else:
        shape = (item.num_experts, *layers.shape, *item.shape)
        stacked = tuple(range(1 + layers.ndim))
        members = [
            Member(name.format(expert=expert), (expert, *index))
            for index, name in names
            for expert in range(item.num_experts)
        ]
    return Leaf(prefix + item.leaf, shape, stacked, item, tuple(members))


def _one_by_one(num_layers: int) -> list[Place]:
    return [Place(f"decoder.layers_{i}", np.array(i)) for i in range(num_layers)]


def _stacked(num_layers: int) -> list[Place]:
    return [Place("decoder.layers", np.arange(num_layers))]


def _remainder(num_layers: int, pattern: int) -> list[Place]:
    """Layers after the last whole block."""
    whole = num_layers - num_layers % pattern
    return [Place(f"decoder.layers_remainder.layers_{i - whole}", np.array(i)) for i in range(whole, num_layers)]


# ---- parts of a layer that families share ----


def _same(leaf: str, tensor: str, *shape: int, shift: float = 0.0) -> Item:
    return Item(leaf, tensor, shape, shape, shift=shift)


def _kernel(leaf: str, tensor: str, rows: int, columns: int, *shape: int, **more: Any) -> Item:
    return Item(leaf, tensor, (rows, columns), shape or (columns, rows), transpose=True, **more)


def _attention(
    D: int, H: int, K: int, N: int, *, rope: bool = False, factor: Factor | None = None, value: bool = True
) -> list[Item]:
    items = [
        _kernel("self_attention.query.kernel", "self_attn.q_proj.weight", H * N, D, D, H, N, rope=rope, factor=factor),
        _kernel("self_attention.key.kernel", "self_attn.k_proj.weight", K * N, D, D, K, N, rope=rope),
    ]
    if value:
        items.append(_kernel("self_attention.value.kernel", "self_attn.v_proj.weight", K * N, D, D, K, N))
    return [*items, _kernel("self_attention.out.kernel", "self_attn.o_proj.weight", D, H * N, H, N, D)]


def _qk_norms(N: int, shift: float = 0.0) -> list[Item]:
    return [
        _same("self_attention.query_norm.scale", "self_attn.q_norm.weight", N, shift=shift),
        _same("self_attention.key_norm.scale", "self_attn.k_norm.weight", N, shift=shift),
    ]


def _mlp(D: int, F: int, prefix: str = "mlp") -> list[Item]:
    return [
        _kernel(f"{prefix}.wi_0.kernel", "mlp.gate_proj.weight", F, D),
        _kernel(f"{prefix}.wi_1.kernel", "mlp.up_proj.weight", F, D),
        _kernel(f"{prefix}.wo.kernel", "mlp.down_proj.weight", D, F),
    ]


def _pre_norms(D: int) -> list[Item]:
    """Norms before attention and MLP, by the names of Llama and its relatives."""
    return [
        _same("pre_self_attention_layer_norm.scale", "input_layernorm.weight", D),
        _same("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", D),
    ]


def _sandwich_norms(D: int, shift: float = 0.0) -> list[Item]:
    """Norms before and after attention and MLP, by the names of Gemma."""
    return [
        _same("pre_self_attention_norm.scale", "input_layernorm.weight", D, shift=shift),
        _same("post_self_attention_norm.scale", "post_attention_layernorm.weight", D, shift=shift),
        _same("pre_ffw_norm.scale", "pre_feedforward_layernorm.weight", D, shift=shift),
        _same("post_ffw_norm.scale", "post_feedforward_layernorm.weight", D, shift=shift),
    ]


def _outer(base: str, V: int, D: int, *, tied: bool, factor: Factor | None = None, shift: float = 0.0) -> list[Item]:
    items = [
        Item("token_embedder.embedding", f"{base}.embed_tokens.weight", (V, D), (V, D), factor=factor),
        _same("decoder.decoder_norm.scale", f"{base}.norm.weight", D, shift=shift),
    ]
    return items if tied else [*items, _kernel("decoder.logits_dense.kernel", "lm_head.weight", V, D)]


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int, int, int, int]:
    """L, D, H, K, N, F, V of a config.json."""
    D, H = config["hidden_size"], config["num_attention_heads"]
    return (
        config["num_hidden_layers"],
        D,
        H,
        config.get("num_key_value_heads") or H,
        config.get("head_dim") or D // H,
        config["intermediate_size"],
        config["vocab_size"],
    )


def _query_factor(N: int) -> Factor:
    return Factor(1 / math.sqrt(N), math.sqrt(N))


# ---- families ----


def _llama(config: Mapping[str, Any]) -> Family:
    """Llama and Mistral. MaxText interleaves rotary pairs for Llama 3.1's rope only."""
    L, D, H, K, N, F, V = _sizes(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    interleaved = (rope.get("rope_type") or rope.get("type")) == "llama3"
    items = [
        *_pre_norms(D),
        *_attention(D, H, K, N, rope=interleaved, factor=_query_factor(N)),
        *_mlp(D, F),
    ]
    tied = bool(config.get("tie_word_embeddings", False))
    return Family(L, "model.layers.{layer}.", lambda _: items, _outer("model", V, D, tied=tied), _stacked(L))


def _mixtral(config: Mapping[str, Any]) -> Family:
    L, D, H, K, N, F, V = _sizes(config)
    E = config["num_local_experts"]
    expert = "block_sparse_moe.experts.{expert}"
    items = [
        *_pre_norms(D),
        *_attention(D, H, K, N, factor=_query_factor(N)),
        _kernel("MoeBlock_0.gate.kernel", "block_sparse_moe.gate.weight", E, D),
        _kernel("MoeBlock_0.wi_0", f"{expert}.w1.weight", F, D, num_experts=E),
        _kernel("MoeBlock_0.wi_1", f"{expert}.w3.weight", F, D, num_experts=E),
        _kernel("MoeBlock_0.wo", f"{expert}.w2.weight", D, F, num_experts=E),
    ]
    tied = bool(config.get("tie_word_embeddings", False))
    return Family(L, "model.layers.{layer}.", lambda _: items, _outer("model", V, D, tied=tied), _stacked(L))


def _qwen(config: Mapping[str, Any]) -> Family:
    """Qwen 2.5 (biases on q, k, v), Qwen 3 (norms on q and k), Qwen 3 mixture of experts."""
    L, D, H, K, N, F, V = _sizes(config)
    items = [*_pre_norms(D), *_attention(D, H, K, N)]
    if config["model_type"] == "qwen2":
        items += [
            Item(f"self_attention.{name}.bias", f"self_attn.{name[0]}_proj.bias", (heads * N,), (heads, N))
            for name, heads in (("query", H), ("key", K), ("value", K))
        ]
    else:
        items += _qk_norms(N)
    if config["model_type"] == "qwen3_moe":
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise CheckpointError("config.json: MaxText's Qwen 3 has experts in every layer or in none")
        E, M = config["num_experts"], config["moe_intermediate_size"]
        expert = "mlp.experts.{expert}"
        items += [
            _kernel("moe_block.gate.kernel", "mlp.gate.weight", E, D),
            _kernel("moe_block.wi_0", f"{expert}.gate_proj.weight", M, D, num_experts=E),
            _kernel("moe_block.wi_1", f"{expert}.up_proj.weight", M, D, num_experts=E),
            _kernel("moe_block.wo", f"{expert}.down_proj.weight", D, M, num_experts=E),
        ]
    else:
        items += _mlp(D, F)
    tied = bool(config.get("tie_word_embeddings", False))
    return Family(L, "model.layers.{layer}.", lambda _: items, _outer("model", V, D, tied=tied), _stacked(L))


GEMMA_PATTERN = 6  # five local layers, then a global one


def _text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """(text config, prefix of its tensors) of a Gemma."""
    text, base = (config["text_config"], "model.language_model") if "text_config" in config else (config, "model")
    if not config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)):
        raise CheckpointError("config.json: tie_word_embeddings is false; MaxText's Gemma has no head of its own")
    _check_pattern(text)
    return text, base


def _check_pattern(text: Mapping[str, Any]) -> None:
    types = text.get("layer_types")
    right = [
        "full_attention" if i % GEMMA_PATTERN == GEMMA_PATTERN - 1 else "sliding_attention"
        for i in range(text["num_hidden_layers"])
    ]
    if types is not None and list(types) != right:
        raise CheckpointError("config.json: layer_types is not MaxText's pattern, every sixth layer global")


def _gemma3(config: Mapping[str, Any]) -> Family:
    text, base = _text_part(config)
    L, D, H, K, N, F, V = _sizes(text)
    # MaxText's norms multiply by the scale, Gemma 3's by one more than it.
    items = [
        *_sandwich_norms(D, shift=1.0),
        *_attention(D, H, K, N),
        *_qk_norms(N, shift=1.0),
        *_mlp(D, F),
    ]
    root = Factor(float(ml_dtypes.bfloat16(math.sqrt(D))))
    whole = L - L % GEMMA_PATTERN
    places = [
        Place(f"decoder.layers.layers_{i}", np.arange(i, whole, GEMMA_PATTERN))
        for i in range(GEMMA_PATTERN if whole else 0)
    ]
    outer = _outer(base, V, D, tied=True, factor=root, shift=1.0)
    return Family(
        L,
        base + ".layers.{layer}.",
        lambda _: items,
        outer,
        [*places, *_remainder(L, GEMMA_PATTERN)],
    )


def _gemma4(config: Mapping[str, Any]) -> Family:
    text, base = _text_part(config)
    if text.get("hidden_size_per_layer_input"):
        raise CheckpointError(
            "config.json: hidden_size_per_layer_input is set (Gemma 4 E2B, E4B); their MaxText layout is not known here"
        )
    L, D, H, K, N, F, V = _sizes(text)
    experts = bool(text.get("enable_moe_block"))

    def layer_items(layer: int) -> list[Item]:
        heads, width, value = K, N, True
        if layer % GEMMA_PATTERN == GEMMA_PATTERN - 1:
            heads, width = _global_heads(text, layer, K, N)
            value = not text.get("attention_k_eq_v")
        items = [
            *_sandwich_norms(D),
            *_attention(D, H, heads, width, value=value),
            *_qk_norms(width),
            _same("layer_scalar", "layer_scalar", 1),
        ]
        if not experts:
            return [*items, *_mlp(D, F)]
        E, M = text["num_experts"], text["moe_intermediate_size"]
        block = "mlp.moe_block.MoeBlock_0"
        fused = ("experts.gate_up_proj", (E, 2 * M, D), (E, D, M))
        return [
            *items,
            _same("mlp.pre_feedforward_layernorm_2.scale", "pre_feedforward_layernorm_2.weight", D),
            _same("mlp.post_feedforward_layernorm_1.scale", "post_feedforward_layernorm_1.weight", D),
            _same("mlp.post_feedforward_layernorm_2.scale", "post_feedforward_layernorm_2.weight", D),
            _same("mlp.pre_forward_scale_2", "router.scale", D),
            _kernel(f"{block}.gate.kernel", "router.proj.weight", E, D),
            _same(f"{block}.per_expert_scale", "router.per_expert_scale", E),
            Item(f"{block}.wi_0", *fused, transpose=True, half=0),
            Item(f"{block}.wi_1", *fused, transpose=True, half=1),
            Item(f"{block}.wo", "experts.down_proj", (E, D, M), (E, M, D), transpose=True),
            *_mlp(D, F, "mlp.moe_block.shared_experts"),
        ]

    blocks = L // GEMMA_PATTERN
    numbers = np.arange(blocks * GEMMA_PATTERN).reshape(blocks, GEMMA_PATTERN)
    places = []
    if blocks:
        places = [
            Place("decoder.scanned_blocks.local_layers", numbers[:, :-1]),
            Place("decoder.scanned_blocks.global_layer", numbers[:, -1]),
        ]
    outer = _outer(base, V, D, tied=True, factor=Factor(float(np.float32(math.sqrt(D)))))
    return Family(L, base + ".layers.{layer}.", layer_items, outer, [*places, *_remainder(L, GEMMA_PATTERN)])


def _global_heads(text: Mapping[str, Any], layer: int, K: int, N: int) -> tuple[int, int]:
    """kv heads and head width of a global layer; transformers 5 writes them per layer, or as global_*."""
    own = {int(key): value for key, value in (text.get("per_layer_config") or {}).items()}.get(layer, {})
    heads = own.get("num_key_value_heads") or text.get("num_global_key_value_heads") or K
    return heads, own.get("head_dim") or text.get("global_head_dim") or N


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], Family]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
}
