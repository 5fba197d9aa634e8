"""What differs per model family: config.json -> ModelSpec, tensor names <-> parameter tree, published sizes.

One family so far, so the functions of `llama` are the registry; `spec_from_hf` and `resolve_config` are
the way in.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from burnish.models.errors import ModelError
from burnish.models.families import llama
from burnish.models.families.llama import buffer_values, tensor_map, tied_head_copy
from burnish.models.families.presets import PRESETS
from burnish.models.families.tensors import TensorMapping
from burnish.models.spec import ModelSpec

__all__ = [
    "PRESETS",
    "TensorMapping",
    "buffer_values",
    "preset_config",
    "resolve_config",
    "spec_from_hf",
    "tensor_map",
    "tied_head_copy",
]


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""
    if config.get("model_type") != llama.FAMILY:
        raise ModelError(
            f"config.json: model_type is {config.get('model_type')!r}; supported: {llama.FAMILY!r}"
        )
    return llama.spec_from_hf(config)


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
            f"{_HF_FIELDS.get(k, k)} is {found[k]} there and {asked[k]} in {model_name}"
            for k in asked
            if asked[k] != found[k]
        ]
        if differ:
            raise ModelError(
                f"model_name={model_name} does not describe {where}: {'; '.join(differ)}. "
                "Leave model_name out to use the checkpoint's own config.json."
            )
    return config


# The names that people know from config.json, where the spec has another.
_HF_FIELDS = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "d_mlp": "intermediate_size",
    "tied_head": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "rope.theta": "rope_theta",
    "rope.kind": "rope_type",
}


def _flat(spec: ModelSpec) -> dict[str, Any]:
    fields = dataclasses.asdict(spec)
    return fields | {f"rope.{k}": v for k, v in fields.pop("rope").items()}
