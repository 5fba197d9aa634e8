"""Gemma 4, text (31B and 26B-A4B): five layers with a sliding window, then one that sees everything with wider heads,
fewer kv heads, keys that are the values, and rope on a quarter of the width; in 26B-A4B experts beside a dense MLP.

Multimodal checkpoints (model_type "gemma4") are read for their text part; vision and audio towers are left out. E2B
and E4B are refused: per-layer inputs and keys and values shared between layers are not computed here.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from burnish.models.errors import ModelError
from burnish.models.families import config as read
from burnish.models.families.family import Family
from burnish.models.families.gemma3 import GEMMA_NAMES, text_config
from burnish.models.families.tensors import FusedExpertNames, TensorMapping, decoder_map
from burnish.models.spec import ExpertsSpec, LayerKind, ModelSpec, RopeSpec

_ARCHITECTURES = {"gemma4_text": "Gemma4ForCausalLM", "gemma4": "Gemma4ForConditionalGeneration"}
_PREFIXES = {"gemma4_text": "model.", "gemma4": "model.language_model."}

# What transformers takes where a config.json does not say.
_DEFAULTS = {
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "global_head_dim": 512,
}
_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""
    family = config["model_type"]
    text = {**_DEFAULTS, **text_config(config, "gemma4"), "architectures": config.get("architectures")}
    for field in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if text.get(field):
            raise ModelError(
                f"config.json: {field} is {text[field]!r}; only 0 is supported "
                "(Gemma 4 E2B and E4B are not, 26B-A4B and 31B are)"
            )
    read.check_fields(
        text,
        "Gemma 4",
        architectures=(_ARCHITECTURES[family],),
        used=(
            "sliding_window",
            "layer_types",
            "final_logit_softcapping",
            "attention_bias",
            "attention_k_eq_v",
            "global_head_dim",
            "num_global_key_value_heads",
            "per_layer_config",
            "enable_moe_block",
            "num_experts",
            "top_k_experts",
            "moe_intermediate_size",
            "vocab_size_per_layer_input",  # of a table that is not there
            "use_double_wide_mlp",  # of layers with shared keys and values, which are not there
        ),
        only={
            "hidden_activation": ("gelu_pytorch_tanh",),
            # "vision" lets image tokens see each other; there are none in text.
            "use_bidirectional_attention": ("vision",),
        },
    )
    sizes = read.sizes(text, kv_heads=4, head_dim=256)
    L = sizes["num_layers"]
    types = text.get("layer_types") or ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(L)]
    if types[-1] != "full_attention":
        raise ModelError("config.json: the last of layer_types must be 'full_attention'")
    ropes = {kind: _rope(text, kind) for kind in _ROPES}
    kv_heads, head_dim = _global_heads(text, sizes, types)
    return ModelSpec(
        family=family,
        **sizes,
        tied_head=read.flag(text, "tie_word_embeddings"),
        max_positions=read.positive(text, "max_position_embeddings"),
        rope=ropes["sliding_attention"],
        attention_bias=read.flag(text, "attention_bias"),
        output_bias=read.flag(text, "attention_bias"),
        activation="gelu_tanh",
        query_scale=1.0,
        final_softcap=read.optional_number(text, "final_logit_softcapping"),
        qk_norm=True,
        v_norm=True,
        norm_rounds_last=True,
        output_norms=True,
        embed_scale=sizes["d_model"] ** 0.5,
        layer_scalar=True,
        experts=_experts(text) if read.flag(text, "enable_moe_block") else None,
        pattern=read.pattern(
            text,
            L,
            {
                "sliding_attention": LayerKind(window=read.positive(text, "sliding_window")),
                "full_attention": LayerKind(
                    num_kv_heads=kv_heads,
                    head_dim=head_dim,
                    rope=ropes["full_attention"],
                    keys_are_values=read.flag(text, "attention_k_eq_v"),
                ),
            },
            types,
        ),
    )


def _global_heads(text: Mapping[str, Any], sizes: Mapping[str, Any], types: list[str]) -> tuple[int, int]:
    """(kv heads, head width) of full layers: global_* fields, or per_layer_config of transformers 5, which names
    every full layer."""
    per_layer = text.get("per_layer_config")
    if per_layer is None:
        shared = read.flag(text, "attention_k_eq_v") and text.get("num_global_key_value_heads") is not None
        kv_heads = read.positive(text, "num_global_key_value_heads") if shared else sizes["num_kv_heads"]
        return kv_heads, read.positive(text, "global_head_dim")
    full = {i for i, kind in enumerate(types) if kind == "full_attention"}
    overrides = {int(i): dict(fields) for i, fields in per_layer.items()}
    alike = {tuple(sorted(fields.items())) for fields in overrides.values()}
    if set(overrides) != full or len(alike) != 1 or not alike.pop() or any(
        set(fields) - {"head_dim", "num_key_value_heads"} for fields in overrides.values()
    ):  # fmt: skip
        raise ModelError(
            "config.json: per_layer_config must give every full_attention layer, and no other, the same head_dim and "
            f"num_key_value_heads; it is {per_layer}"
        )
    fields = next(iter(overrides.values()))
    return (
        read.positive(fields, "num_key_value_heads", default=sizes["num_kv_heads"]),
        read.positive(fields, "head_dim", default=sizes["head_dim"]),
    )


def _rope(text: Mapping[str, Any], kind: str) -> RopeSpec:
    settings = dict((text.get("rope_parameters") or _ROPES).get(kind) or {})
    theta = read.number(settings, "rope_theta", None, f"rope_parameters.{kind}.")
    place = f"rope_parameters.{kind}"
    if settings.get("rope_type") != "proportional":
        return read.rope_from(settings, theta, place)
    rotated = read.number(settings, "partial_rotary_factor", 1.0, f"{place}.")
    plain = {k: v for k, v in settings.items() if k not in ("rope_type", "partial_rotary_factor", "factor")}
    if settings.get("factor") is not None:
        plain |= {"rope_type": "linear", "factor": settings["factor"]}
    return replace(read.rope_from(plain, theta, place), rotated=rotated)


def _experts(text: Mapping[str, Any]) -> ExpertsSpec:
    E, A = read.positive(text, "num_experts"), read.positive(text, "top_k_experts")
    if A > E:
        raise ModelError(f"config.json: top_k_experts ({A}) is more than num_experts ({E})")
    return ExpertsSpec(E, A, read.positive(text, "moe_intermediate_size"), beside_mlp=True)


_NAMES = GEMMA_NAMES | {
    "router": "router.proj.weight",
    "router_scale": "router.scale",
    "expert_scale": "router.per_expert_scale",
    "expert_norm": "pre_feedforward_layernorm_2.weight",
    "expert_output_norm": "post_feedforward_layernorm_2.weight",
    "dense_output_norm": "post_feedforward_layernorm_1.weight",
    "layer_scalar": "layer_scalar",
}


def tensor_map(spec: ModelSpec) -> list[TensorMapping]:
    """Every text tensor and its place in the tree."""
    experts = FusedExpertNames(gate_up="experts.gate_up_proj", down="experts.down_proj")
    return decoder_map(spec, prefix=_PREFIXES[spec.family], names=_NAMES, experts=experts)


def _preset(
    layers: int, d_model: int, heads: int, kv_heads: int, global_kv_heads: int, d_mlp: int, *,
    eos: int | list[int] = 1, experts: dict[str, int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "enable_moe_block": experts is not None,
        "eos_token_id": eos,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": d_model,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": d_mlp,
        "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)],
        "max_position_embeddings": 262_144,
        "model_type": "gemma4_text",
        "num_attention_heads": heads,
        "num_global_key_value_heads": global_kv_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _ROPES,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 262_144,
        **(experts or {}),
    }
    return {
        "architectures": [_ARCHITECTURES["gemma4"]],
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
    }


_26B = (30, 2816, 16, 8, 2, 2112)
_31B = (60, 5376, 32, 16, 4, 21_504)
_A4B = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}

_PRESETS = {
    "gemma4-26b": _preset(*_26B, experts=_A4B),
    "gemma4-26b-it": _preset(*_26B, experts=_A4B, eos=[1, 106]),
    "gemma4-31b": _preset(*_31B),
    "gemma4-31b-it": _preset(*_31B, eos=[1, 106]),
}

FAMILY = Family(
    tuple(_ARCHITECTURES),
    spec_from_hf,
    tensor_map,
    left_out=re.compile(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*"),
    text_only={"gemma4": ("gemma4_text", _ARCHITECTURES["gemma4_text"])},
    presets=_PRESETS,
)
