"""What differs per model family: config.json -> ModelSpec, tensor names <-> parameter tree, published sizes.

Each module of this package that has a FAMILY is one family, found by its file being here; `register` adds one from
outside. `spec_from_hf`, `resolve_config` and `tensor_map` are the way in.
"""

import dataclasses
import difflib
import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from burnish.models.errors import ModelError
from burnish.models.families.family import Family, TextPart
from burnish.models.families.tensors import TensorMapping, head_mapping
from burnish.models.rope import inverse_frequencies
from burnish.models.spec import LayerKind, ModelSpec, RopeSpec

__all__ = [
    "PRESETS",
    "Family",
    "TensorMapping",
    "buffer_values",
    "is_buffer",
    "is_left_out",
    "preset_config",
    "register",
    "resolve_config",
    "spec_from_hf",
    "tensor_map",
    "text_name",
    "text_only_config",
    "tied_head_copy",
]

PRESETS: dict[str, dict[str, Any]] = {}
"""config.json of every published model by the name that model_name takes."""

_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Make a family known by its model types and its presets. Raises ValueError where one is taken."""
    taken = [t for t in family.model_types if t in _FAMILIES] + [p for p in family.presets if p in PRESETS]
    if taken:
        raise ValueError(f"{', '.join(taken)} is known already")
    _FAMILIES.update(dict.fromkeys(family.model_types, family))
    PRESETS.update(family.presets)


for _module in pkgutil.iter_modules(__path__):
    _found = importlib.import_module(f"{__name__}.{_module.name}")
    if hasattr(_found, "FAMILY"):
        register(_found.FAMILY)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise ModelError(f"config.json: model_type is {model_type!r}; supported: {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[model_type].spec_from_hf(config)


def tensor_map(spec: ModelSpec) -> list[TensorMapping]:
    """Every tensor of the checkpoint, in file order, and its place in the tree."""
    return _FAMILIES[spec.family].tensor_map(spec)


def is_left_out(model_type: str, name: str) -> bool:
    """Whether a tensor of a checkpoint is known and deliberately not read: vision and audio towers."""
    family = _FAMILIES.get(model_type)
    pattern = None if family is None else family.left_out
    return pattern is not None and pattern.fullmatch(name) is not None


# What a multimodal config.json says beside its text_config and a text model's says itself.
_OUTER_FIELDS = (
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "transformers_version",
)


def text_only_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the text part alone: of a multimodal model its text_config as that of a model of its own, else
    the same. Raises ModelError where there is no text_config."""
    part = _text_part(config)
    if part is None:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json: text_config is {text!r}, an object is needed")
    outer = {field: config[field] for field in _OUTER_FIELDS if config.get(field) is not None}
    return {**text, **outer, "model_type": part.model_type, "architectures": [part.architecture]}


def text_name(config: Mapping[str, Any], name: str) -> str:
    """What a tensor of a checkpoint is called in a checkpoint of the text part alone."""
    part = _text_part(config)
    return name if part is None or not name.startswith(part.prefix) else "model." + name.removeprefix(part.prefix)


def _text_part(config: Mapping[str, Any]) -> TextPart | None:
    family = _FAMILIES.get(str(config.get("model_type")))
    return None if family is None else family.text_parts.get(config["model_type"])


def tied_head_copy(spec: ModelSpec) -> TensorMapping | None:
    """The lm_head that some files of tied models carry although it equals the embeddings: None for untied
    ones.
    """
    return head_mapping(spec, "embed") if spec.tied_head else None


def is_buffer(name: str) -> bool:
    """Whether a tensor is no parameter: the rotary frequencies that old versions of transformers saved."""
    return re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name) is not None


def buffer_values(spec: ModelSpec) -> list[np.ndarray]:
    """What such a buffer may hold: the frequencies before or after scaling."""
    scaled = inverse_frequencies(spec.rope, spec.head_dim)
    return [scaled, inverse_frequencies(RopeSpec(spec.rope.theta), spec.head_dim)]


def preset_config(model_name: str) -> dict[str, Any]:
    """The config.json of a published model. Raises ModelError with the nearest names."""
    if model_name not in PRESETS:
        near = difflib.get_close_matches(model_name, PRESETS, n=3) or sorted(PRESETS)
        raise ModelError(f"model_name={model_name} is not a known model; did you mean {', '.join(near)}?")
    return dict(PRESETS[model_name])


def resolve_config(model_name: str | None, config: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """The config.json that counts: the checkpoint's own, or the preset where the checkpoint has none.

    `where` names the checkpoint in messages. Raises ModelError where there is neither, and where both are
    there and describe different models: the fields, with both values.
    """
    if config is None:
        if model_name is None:
            raise ModelError(f"{where} has no config.json; say which model it is with model_name=")
        return preset_config(model_name)
    if model_name is not None:
        asked, found = (_flat(spec_from_hf(c)) for c in (preset_config(model_name), config))
        differ = [
            f"{_HF_FIELDS.get(k, k)} is {found.get(k)} there and {asked[k]} in {model_name}"
            if k != "pattern"
            else f"{_HF_FIELDS[k]}: kinds of layers differ in {', '.join(_layer_fields(found[k], asked[k]))}"
            for k in asked
            if asked[k] != found.get(k)
        ]
        if differ:
            raise ModelError(
                f"model_name={model_name} does not describe {where}: {'; '.join(differ)}. "
                "Leave model_name out to use the checkpoint's own config.json."
            )
    return config


def _layer_fields(a: Sequence[LayerKind], b: Sequence[LayerKind]) -> list[str]:
    """In what two patterns of layers differ, in the names of config.json."""
    names = [field.name for field in dataclasses.fields(LayerKind)]
    found = [
        _HF_FIELDS.get(n, n) for n in names if any(getattr(x, n) != getattr(y, n) for x, y in zip(a, b, strict=False))
    ]
    return found + (["their number"] if len(a) != len(b) else [])


# The names that people know from config.json, where the spec has another.
_HF_FIELDS = {
    "family": "model_type",
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "d_mlp": "intermediate_size",
    "tied_head": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "pattern": "layer_types",
    "window": "sliding_window",
    "rope.theta": "rope_theta",
    "rope.kind": "rope_type",
    "experts.num_experts": "num_experts",
    "experts.num_active": "num_experts_per_tok",
    "experts.d_expert": "moe_intermediate_size",
}


def _flat(spec: ModelSpec) -> dict[str, Any]:
    """The fields by name, those of rope and experts with a dot. A multimodal checkpoint and one of its text part
    alone are the same model."""
    fields = {**dataclasses.asdict(spec), "family": spec.family.removesuffix("_text"), "pattern": spec.pattern}
    for part in ("rope", "experts"):
        if fields[part] is not None:
            fields |= {f"{part}.{k}": v for k, v in fields.pop(part).items()}
    return fields
