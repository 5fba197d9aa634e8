"""Mistral (7B and its relatives): Llama with a sliding window in every layer, or none."""

from collections.abc import Mapping
from typing import Any

from burnish.models.families import config as read
from burnish.models.families.family import Family
from burnish.models.families.tensors import decoder_map
from burnish.models.spec import ModelSpec

ARCHITECTURE = "MistralForCausalLM"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""
    read.check_fields(
        config,
        "Mistral",
        architectures=(ARCHITECTURE,),
        used=("sliding_window",),
        only={"hidden_act": ("silu",)},
    )
    # Where the field is missing, and only there, transformers takes 4096; null is no window.
    window = None
    if config.get("sliding_window", 4096) is not None:
        window = read.positive(config, "sliding_window", default=4096)
    return ModelSpec(
        family="mistral",
        **read.sizes(config, kv_heads=8),
        tied_head=read.flag(config, "tie_word_embeddings"),
        max_positions=read.positive(config, "max_position_embeddings", default=131_072),
        rope=read.rope(config),
        window=window,
    )


def _mistral7b(*, vocab: int, theta: float, window: int | None) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14_336,
        "max_position_embeddings": 32_768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab,
    }


_PRESETS = {
    "mistral-7b": _mistral7b(vocab=32_000, theta=1e4, window=4096),
    "mistral-7b-v0.3": _mistral7b(vocab=32_768, theta=1e6, window=None),
}

FAMILY = Family(("mistral",), spec_from_hf, decoder_map, presets=_PRESETS)
