"""Gemma 3, text: five layers with a sliding window, then one that sees everything, each kind with its own rope; norms
that scale by 1 + weight, before and after attention and MLP.

Multimodal checkpoints (model_type "gemma3") are read for their text part; the vision tower is left out.
"""

import re
from collections.abc import Mapping
from typing import Any

from burnish.models.errors import ModelError
from burnish.models.families import config as read
from burnish.models.families.family import Family
from burnish.models.families.tensors import TensorMapping, decoder_map
from burnish.models.spec import LayerKind, ModelSpec, RopeSpec

_ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration"}
_PREFIXES = {"gemma3_text": "model.", "gemma3": "language_model.model."}

# What transformers takes where a config.json, as the published ones, does not say.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

GEMMA_NAMES = {
    "attention_output_norm": "post_attention_layernorm.weight",
    "post_attention_norm": "pre_feedforward_layernorm.weight",
    "mlp_output_norm": "post_feedforward_layernorm.weight",
}


def text_config(config: Mapping[str, Any], multimodal: str) -> Mapping[str, Any]:
    """The text part of a config.json: the file itself, or its text_config where model_type is `multimodal`."""
    if config["model_type"] != multimodal:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json: text_config is {text!r}, an object is needed")
    if config.get("tie_word_embeddings") is not None:
        text = {**text, "tie_word_embeddings": config["tie_word_embeddings"]}
    return {k: v for k, v in text.items() if k not in ("model_type", "architectures")}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""
    family = config["model_type"]
    text = {**_DEFAULTS, **text_config(config, "gemma3"), "architectures": config.get("architectures")}
    read.check_fields(
        text,
        "Gemma 3",
        architectures=(_ARCHITECTURES[family],),
        used=(
            "query_pre_attn_scalar",
            "sliding_window",
            "sliding_window_pattern",
            "layer_types",
            "final_logit_softcapping",
            "rope_local_base_freq",
            "attention_bias",
        ),
        # transformers reads attn_logit_softcapping and does not apply it; no published model has it.
        only={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "hidden_act": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (False,),
        },
    )
    sizes = read.sizes(text, kv_heads=4, head_dim=256)
    ropes = _ropes(text)
    every = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", 6))
    window = read.positive(text, "sliding_window")
    return ModelSpec(
        family=family,
        **sizes,
        tied_head=read.flag(text, "tie_word_embeddings"),
        max_positions=read.positive(text, "max_position_embeddings"),
        rope=ropes["full_attention"],
        attention_bias=read.flag(text, "attention_bias"),
        output_bias=read.flag(text, "attention_bias"),
        activation="gelu_tanh",
        query_scale=read.number(text, "query_pre_attn_scalar", None) ** -0.5,
        final_softcap=read.optional_number(text, "final_logit_softcapping"),
        qk_norm=True,
        norm_offset=1.0,
        norm_rounds_last=True,
        output_norms=True,
        embed_scale=sizes["d_model"] ** 0.5,
        pattern=read.pattern(
            text,
            sizes["num_layers"],
            {
                "full_attention": LayerKind(),
                "sliding_attention": LayerKind(window=window, rope=ropes["sliding_attention"]),
            },
            ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(sizes["num_layers"])],
        ),
    )


def _ropes(text: Mapping[str, Any]) -> dict[str, RopeSpec]:
    """Rope per kind of layer, from the places of transformers 4 (rope_theta, rope_local_base_freq, and rope_scaling
    for full layers) and 5 (rope_parameters)."""
    thetas = {
        "full_attention": read.number(text, "rope_theta", 1e6),
        "sliding_attention": read.number(text, "rope_local_base_freq", 1e4),
    }
    places = text.get("rope_parameters") or {"full_attention": text.get("rope_scaling") or {}}
    where = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    ropes = {}
    for kind, theta in thetas.items():
        settings = places.get(kind) or {}
        ropes[kind] = read.rope_from(settings, read.number(settings, "rope_theta", theta), where)
    return ropes


def tensor_map(spec: ModelSpec) -> list[TensorMapping]:
    """Every text tensor and its place in the tree."""
    return decoder_map(spec, prefix=_PREFIXES[spec.family], names=GEMMA_NAMES)


def _preset(
    layers: int, d_model: int, heads: int, kv_heads: int, d_mlp: int, *, window: int = 1024, head_dim: int = 256,
    query: int = 256, eos: int | list[int] = 1, text_only: bool = False,
) -> dict[str, Any]:  # fmt: skip
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": d_model,
        "initializer_range": 0.02,
        "intermediate_size": d_mlp,
        "max_position_embeddings": 32_768 if text_only else 131_072,
        "model_type": "gemma3_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "query_pre_attn_scalar": query,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": None if text_only else {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1e6,
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "use_cache": True,
        "vocab_size": 262_144 if text_only else 262_208,
    }
    tokens = {"bos_token_id": 2, "eos_token_id": eos, "pad_token_id": 0, "torch_dtype": "bfloat16"}
    if text_only:
        return text | tokens | {"architectures": [_ARCHITECTURES["gemma3_text"]]}
    return tokens | {"architectures": [_ARCHITECTURES["gemma3"]], "model_type": "gemma3", "text_config": text}


_270M: dict[str, Any] = {"window": 512, "text_only": True}
_27B: dict[str, Any] = {"head_dim": 128, "query": 168}
_IT: dict[str, Any] = {"eos": [1, 106]}

_PRESETS = {
    "gemma3-270m": _preset(18, 640, 4, 1, 2048, **_270M),
    "gemma3-270m-it": _preset(18, 640, 4, 1, 2048, **_270M | _IT),
    "gemma3-1b": _preset(26, 1152, 4, 1, 6912, **_270M),
    "gemma3-1b-it": _preset(26, 1152, 4, 1, 6912, **_270M | _IT),
    "gemma3-4b": _preset(34, 2560, 8, 4, 10_240),
    "gemma3-4b-it": _preset(34, 2560, 8, 4, 10_240, **_IT),
    "gemma3-12b": _preset(48, 3840, 16, 8, 15_360),
    "gemma3-12b-it": _preset(48, 3840, 16, 8, 15_360, **_IT),
    "gemma3-27b": _preset(62, 5376, 32, 16, 21_504, **_27B),
    "gemma3-27b-it": _preset(62, 5376, 32, 16, 21_504, **_27B | _IT),
}

FAMILY = Family(
    tuple(_ARCHITECTURES),
    spec_from_hf,
    tensor_map,
    left_out=re.compile(r"(vision_tower|multi_modal_projector)\..*"),
    text_only={"gemma3": ("gemma3_text", _ARCHITECTURES["gemma3_text"])},
    presets=_PRESETS,
)
