"""Mixtral: Mistral with a mixture of experts in the place of every MLP."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from burnish.models.errors import ModelError
from burnish.models.families import config as read
from burnish.models.families.family import Family
from burnish.models.families.tensors import ExpertNames, decoder_map
from burnish.models.spec import ExpertsSpec, ModelSpec

ARCHITECTURE = "MixtralForCausalLM"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""
    read.check_fields(
        config,
        "Mixtral",
        architectures=(ARCHITECTURE,),
        used=("sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"),
        only={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)},
    )
    field = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    E = read.positive(config, field, default=8)
    A = read.positive(config, "num_experts_per_tok", default=2)
    if A > E:
        raise ModelError(f"config.json: num_experts_per_tok ({A}) is more than {field} ({E})")
    sizes = read.sizes(config, kv_heads=8) | {"rms_norm_eps": read.number(config, "rms_norm_eps", 1e-5)}
    return ModelSpec(
        family="mixtral",
        **sizes,
        tied_head=read.flag(config, "tie_word_embeddings"),
        max_positions=read.positive(config, "max_position_embeddings", default=131_072),
        rope=read.rope(config, 1e6),
        window=None if config.get("sliding_window") is None else read.positive(config, "sliding_window"),
        experts=ExpertsSpec(num_experts=E, num_active=A, d_expert=sizes["d_mlp"]),
    )


_EXPERTS = ExpertNames(
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)


def _mixtral(layers: int, d_model: int, heads: int, d_mlp: int, positions: int) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": d_model,
        "initializer_range": 0.02,
        "intermediate_size": d_mlp,
        "max_position_embeddings": positions,
        "model_type": "mixtral",
        "num_attention_heads": heads,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32_000,
    }


_PRESETS = {
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14_336, 32_768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16_384, 65_536),
}

FAMILY = Family(
    ("mixtral",),
    spec_from_hf,
    partial(decoder_map, names={"router": "block_sparse_moe.gate.weight"}, experts=_EXPERTS),
    presets=_PRESETS,
)
