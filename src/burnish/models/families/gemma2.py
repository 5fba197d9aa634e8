"""Gemma 2: layers with a sliding window and layers without take turns; attention scores and logits are soft-capped."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from burnish.models.families import config as read
from burnish.models.families.family import Family
from burnish.models.families.gemma3 import GEMMA_NAMES
from burnish.models.families.tensors import decoder_map
from burnish.models.spec import LayerKind, ModelSpec

ARCHITECTURE = "Gemma2ForCausalLM"

# What transformers takes where a config.json does not say; null is none.
_DEFAULTS = {
    "num_attention_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""
    config = {**_DEFAULTS, **config}
    read.check_fields(
        config,
        "Gemma 2",
        architectures=(ARCHITECTURE,),
        used=(
            "query_pre_attn_scalar",
            "sliding_window",
            "layer_types",
            "final_logit_softcapping",
            "attn_logit_softcapping",
            "attention_bias",
        ),
        only={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "hidden_act": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": (False,),
        },
    )
    sizes = read.sizes(config, kv_heads=4, head_dim=256)
    L = sizes["num_layers"]
    return ModelSpec(
        family="gemma2",
        **sizes,
        tied_head=read.flag(config, "tie_word_embeddings"),
        max_positions=read.positive(config, "max_position_embeddings"),
        rope=read.rope(config),
        attention_bias=read.flag(config, "attention_bias"),
        output_bias=read.flag(config, "attention_bias"),
        activation="gelu_tanh",
        query_scale=read.number(config, "query_pre_attn_scalar", None) ** -0.5,
        attention_softcap=read.optional_number(config, "attn_logit_softcapping"),
        final_softcap=read.optional_number(config, "final_logit_softcapping"),
        norm_offset=1.0,
        norm_rounds_last=True,
        output_norms=True,
        embed_scale=sizes["d_model"] ** 0.5,
        pattern=read.pattern(
            config,
            L,
            {
                "sliding_attention": LayerKind(window=read.positive(config, "sliding_window")),
                "full_attention": LayerKind(),
            },
            ["sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(L)],
        ),
    )


def _preset(
    layers: int, d_model: int, heads: int, kv_heads: int, d_mlp: int, *, head_dim: int = 256, query: int = 256
) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": head_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": d_model,
        "initializer_range": 0.02,
        "intermediate_size": d_mlp,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pad_token_id": 0,
        "query_pre_attn_scalar": query,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 256_000,
    }


_PRESETS = {
    "gemma2-2b": _preset(26, 2304, 8, 4, 9216),
    "gemma2-9b": _preset(42, 3584, 16, 8, 14_336),
    "gemma2-27b": _preset(46, 4608, 32, 16, 36_864, head_dim=128, query=144),
}

FAMILY = Family(("gemma2",), spec_from_hf, partial(decoder_map, names=GEMMA_NAMES), presets=_PRESETS)
