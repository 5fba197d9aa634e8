"""Qwen 2 and 2.5: Llama with biases on q, k and v; optionally a sliding window in the later layers."""

from collections.abc import Mapping
from typing import Any

from burnish.models.families import config as read
from burnish.models.families.family import Family
from burnish.models.families.tensors import decoder_map
from burnish.models.spec import LayerKind, ModelSpec

ARCHITECTURE = "Qwen2ForCausalLM"


def window_pattern(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Full attention in the first max_window_layers layers, a window after them where use_sliding_window is true;
    or as layer_types says (Qwen 2 and 3)."""
    L = read.positive(config, "num_hidden_layers")
    kinds = {"full_attention": LayerKind()}
    first = L
    if read.flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None:
        kinds["sliding_attention"] = LayerKind(window=read.positive(config, "sliding_window", default=4096))
        first = config.get("max_window_layers", 28)
    default = ["full_attention" if i < first else "sliding_attention" for i in range(L)]
    return read.pattern(config, L, kinds, default)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""
    read.check_fields(
        config,
        "Qwen 2",
        architectures=(ARCHITECTURE,),
        used=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
        only={"hidden_act": ("silu",), "use_mrope": (False,)},
    )
    return ModelSpec(
        family="qwen2",
        **read.sizes(config, kv_heads=32),
        tied_head=read.flag(config, "tie_word_embeddings"),
        max_positions=read.positive(config, "max_position_embeddings", default=32_768),
        rope=read.rope(config),
        attention_bias=True,
        pattern=window_pattern(config),
    )


def _qwen25(
    layers: int, d_model: int, heads: int, kv_heads: int, d_mlp: int, *, tied: bool = False, positions: int = 131_072,
    eps: float = 1e-6, vocab: int = 152_064, eos: int = 151_643,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [ARCHITECTURE],
        "attention_dropout": 0.0,
        "bos_token_id": 151_643,
        "eos_token_id": eos,
        "hidden_act": "silu",
        "hidden_size": d_model,
        "initializer_range": 0.02,
        "intermediate_size": d_mlp,
        "max_position_embeddings": positions,
        "max_window_layers": layers,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": eps,
        "rope_theta": 1e6,
        "sliding_window": positions,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }


_SMALL: dict[str, Any] = {"vocab": 151_936, "tied": True}
_INSTRUCT: dict[str, Any] = {"positions": 32_768, "eos": 151_645}
_05B = (24, 896, 14, 2, 4864)
_15B = (28, 1536, 12, 2, 8960)
_3B = (36, 2048, 16, 2, 11_008)
_7B = (28, 3584, 28, 4, 18_944)
_14B = (48, 5120, 40, 8, 13_824)
_32B = (64, 5120, 40, 8, 27_648)
_72B = (80, 8192, 64, 8, 29_568)

_PRESETS = {
    "qwen2.5-0.5b": _qwen25(*_05B, **_SMALL | {"positions": 32_768}),
    "qwen2.5-0.5b-Instruct": _qwen25(*_05B, **_SMALL | _INSTRUCT),
    "qwen2.5-1.5b": _qwen25(*_15B, **_SMALL),
    "qwen2.5-1.5b-Instruct": _qwen25(*_15B, **_SMALL | _INSTRUCT),
    "qwen2.5-3b": _qwen25(*_3B, **_SMALL | {"positions": 32_768}),
    "qwen2.5-3b-Instruct": _qwen25(*_3B, **_SMALL | _INSTRUCT),
    "qwen2.5-7b": _qwen25(*_7B),
    "qwen2.5-7b-Instruct": _qwen25(*_7B, **_INSTRUCT),
    "qwen2.5-14b": _qwen25(*_14B, eps=1e-5),
    "qwen2.5-14b-Instruct": _qwen25(*_14B, **_INSTRUCT),
    "qwen2.5-32b": _qwen25(*_32B, eps=1e-5),
    "qwen2.5-32b-Instruct": _qwen25(*_32B, **_INSTRUCT),
    "qwen2.5-72b": _qwen25(*_72B, eps=1e-5),
    "qwen2.5-72b-Instruct": _qwen25(*_72B, **_INSTRUCT),
}

FAMILY = Family(("qwen2",), spec_from_hf, decoder_map, presets=_PRESETS)
