"""Qwen 3, dense and mixture of experts: Llama with norms of each query and key head."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from burnish.models.errors import ModelError
from burnish.models.families import config as read
from burnish.models.families.family import Family
from burnish.models.families.qwen2 import window_pattern
from burnish.models.families.tensors import ExpertNames, decoder_map
from burnish.models.spec import ExpertsSpec, LayerKind, ModelSpec, shortest_pattern

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_DENSE_FIELDS = ("max_window_layers", "layer_types")
_EXPERT_FIELDS = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""
    family = config["model_type"]
    sparse = family == "qwen3_moe"
    read.check_fields(
        config,
        "Qwen 3",
        architectures=(_ARCHITECTURES[family],),
        used=("attention_bias", "use_sliding_window", "sliding_window", *(_EXPERT_FIELDS if sparse else _DENSE_FIELDS)),
        # Mixtures have the field too, but transformers reads it for dense models only.
        only={"hidden_act": ("silu",), **({"max_window_layers": (config.get("max_window_layers"),)} if sparse else {})},
    )
    common: dict[str, Any] = {
        "family": family,
        "tied_head": read.flag(config, "tie_word_embeddings"),
        "max_positions": read.positive(config, "max_position_embeddings", default=32_768),
        "rope": read.rope(config),
        "attention_bias": read.flag(config, "attention_bias"),
        "output_bias": read.flag(config, "attention_bias"),
        "qk_norm": True,
    }
    if not sparse:
        return ModelSpec(**read.sizes(config, kv_heads=32, head_dim=128), **common, pattern=window_pattern(config))
    window = None
    if read.flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None:
        window = read.positive(config, "sliding_window", default=4096)
    return ModelSpec(
        **read.sizes(config, kv_heads=4),
        **common,
        window=window,
        experts=_experts(config),
        pattern=_dense_layers(config),
    )


def _experts(config: Mapping[str, Any]) -> ExpertsSpec:
    field = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    E = read.positive(config, field, default=128)
    A = read.positive(config, "num_experts_per_tok", default=8)
    if A > E:
        raise ModelError(f"config.json: num_experts_per_tok ({A}) is more than {field} ({E})")
    return ExpertsSpec(
        num_experts=E,
        num_active=A,
        d_expert=read.positive(config, "moe_intermediate_size", default=768),
        normalise=read.flag(config, "norm_topk_prob"),
    )


def _dense_layers(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    step = read.positive(config, "decoder_sparse_step", default=1)
    plain = config.get("mlp_only_layers") or []
    L = read.positive(config, "num_hidden_layers")
    return shortest_pattern([LayerKind(dense=i in plain or (i + 1) % step != 0) for i in range(L)])


_NAMES = ExpertNames(
    gate="mlp.experts.{}.gate_proj.weight", up="mlp.experts.{}.up_proj.weight", down="mlp.experts.{}.down_proj.weight"
)


def _preset(
    layers: int, d_model: int, heads: int, kv_heads: int, d_mlp: int, *,
    tied: bool = False, d_expert: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    family = "qwen3" if d_expert is None else "qwen3_moe"
    experts = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": d_expert,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    return {
        "architectures": [_ARCHITECTURES[family]],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": d_model,
        "initializer_range": 0.02,
        "intermediate_size": d_mlp,
        "max_position_embeddings": 40_960,
        "max_window_layers": layers,
        "model_type": family,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151_936,
    } | ({} if d_expert is None else experts)


_PRESETS = {
    "qwen3-0.6b": _preset(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _preset(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _preset(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _preset(36, 4096, 32, 8, 12_288),
    "qwen3-14b": _preset(40, 5120, 40, 8, 17_408),
    "qwen3-32b": _preset(64, 5120, 64, 8, 25_600),
    "qwen3-30b-a3b": _preset(48, 2048, 32, 4, 6144, d_expert=768),
    "qwen3-235b-a22b": _preset(94, 4096, 64, 4, 12_288, d_expert=1536),
}

FAMILY = Family(tuple(_ARCHITECTURES), spec_from_hf, partial(decoder_map, experts=_NAMES), presets=_PRESETS)
