"""Tiny random checkpoints with the real structure of each family, written without any code of burnish.

Configs are as published ones look; tensor names and shapes are stated here by rule and checked by loading the files
into transformers, strictly (make_references.py). Weights come from NumPy's generator, seeded by tensor name.
"""

import zlib
from typing import Any

import numpy as np

_COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 64,
}
_QWEN2 = _COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "use_sliding_window": False,
    "sliding_window": 8,
    "max_window_layers": 2,
}
_QWEN3 = _QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "attention_bias": False,
}
_QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "head_dim": 16,
    "rope_theta": 1e4,
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_MISTRAL = _COMMON | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "sliding_window": 7,
}
_MIXTRAL = _COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
_GEMMA2 = _COMMON | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "rope_theta": 1e4,
    "num_hidden_layers": 5,
    "query_pre_attn_scalar": 24,
    "sliding_window": 7,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
}
_GEMMA3 = _COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "num_hidden_layers": 8,  # one pattern of five and one, two layers over
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 24,
    "rope_theta": 1e5,
    "rope_local_base_freq": 100.0,
    "sliding_window": 7,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_GEMMA4_LAYERS = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(12)]
_GEMMA4 = _COMMON | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 8.0,
    "global_head_dim": 16,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "layer_types": _GEMMA4_LAYERS,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
    },
    "sliding_window": 7,
    "tie_word_embeddings": True,
}
_EXPERTS4 = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 12}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN2,
    "qwen2_tied_seven_heads": _QWEN2
    | {"tie_word_embeddings": True, "hidden_size": 28, "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen2_windows_in_later_layers": _QWEN2
    | {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3},
    "qwen2_yarn": _QWEN2 | {"rope_scaling": _YARN},
    "qwen2_yarn_untruncated": _QWEN2
    | {"rope_theta": None, "rope_parameters": _YARN | {"rope_theta": 500.0, "truncate": False, "beta_fast": 4.0}},
    "qwen3": _QWEN3,
    "qwen3_tied_biases": _QWEN3 | {"tie_word_embeddings": True, "attention_bias": True},
    "qwen3_windows": _QWEN3
    | {
        "use_sliding_window": True,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_probabilities_as_they_are": _QWEN3_MOE | {"norm_topk_prob": False, "tie_word_embeddings": True},
    "qwen3_moe_every_second_layer": _QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 5},
    "qwen3_moe_one_plain_layer": _QWEN3_MOE | {"mlp_only_layers": [1], "num_hidden_layers": 3},
    "qwen3_moe_all_experts": _QWEN3_MOE | {"num_experts": 3},
    "mistral": _MISTRAL,
    "mistral_no_window": _MISTRAL | {"sliding_window": None},
    "mixtral": _MIXTRAL,
    "mixtral_window_one_expert": _MIXTRAL | {"sliding_window": 9, "num_experts_per_tok": 1},
    "gemma2": _GEMMA2,
    "gemma2_without_caps": _GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": _GEMMA3,
    "gemma3_linear_rope": _GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3_new_places": {k: v for k, v in _GEMMA3.items() if "rope" not in k and "pattern" not in k}
    | {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "final_logit_softcapping": 8.0,
    },
    "gemma3_untied": _GEMMA3 | {"tie_word_embeddings": False, "num_hidden_layers": 6, "attention_bias": True},
    "gemma4": _GEMMA4,
    "gemma4_experts": _GEMMA4 | _EXPERTS4,
    "gemma4_values_of_their_own": _GEMMA4 | {"attention_k_eq_v": False, "num_global_key_value_heads": None},
    "gemma4_full_rope": _GEMMA4
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e4,
                "factor": 4.0,
            },
        },
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
}

ONE_OF_EACH = (
    "qwen2_windows_in_later_layers",
    "qwen3_tied_biases",
    "qwen3_moe_every_second_layer",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3",
    "gemma4_experts",
)
"""For what is not tried with every variant: one per family, with most of what the family has."""


def family_config(name: str) -> dict[str, Any]:
    """config.json of a variant; a field set to None to take it away is left out, but where null says something."""
    telling = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    return {k: v for k, v in VARIANTS[name].items() if v is not None or k in telling}


def _layer_shapes(config: dict[str, Any], i: int) -> dict[str, tuple[int, ...]]:
    kind = config["model_type"]
    gemma = kind.startswith("gemma")
    D, F, H, K = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    N = config.get("head_dim", D // H)
    full = config.get("layer_types", [None] * (i + 1))[i] == "full_attention"
    wide = kind == "gemma4_text" and full
    if wide:
        N, K = config["global_head_dim"], config.get("num_global_key_value_heads", K)
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (H * N, D),
        "self_attn.k_proj.weight": (K * N, D),
        "self_attn.v_proj.weight": (K * N, D),
        "self_attn.o_proj.weight": (D, H * N),
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
    }
    if wide and config["attention_k_eq_v"]:
        del shapes["self_attn.v_proj.weight"]
    biased = "qkv" if kind == "qwen2" else "qkvo" if config.get("attention_bias") else ""
    for b in biased:
        shapes[f"self_attn.{b}_proj.bias"] = shapes[f"self_attn.{b}_proj.weight"][:1]
    if kind in ("qwen3", "qwen3_moe", "gemma3_text", "gemma4_text"):
        shapes |= {"self_attn.q_norm.weight": (N,), "self_attn.k_norm.weight": (N,)}
    if gemma:
        shapes |= {"pre_feedforward_layernorm.weight": (D,), "post_feedforward_layernorm.weight": (D,)}
    if kind == "gemma4_text":
        shapes["layer_scalar"] = (1,)
    dense = {"mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F)}
    sparse = kind == "qwen3_moe" and i not in config["mlp_only_layers"] and (i + 1) % config["decoder_sparse_step"] == 0
    if kind == "mixtral":
        E = config["num_local_experts"]
        shapes["block_sparse_moe.gate.weight"] = (E, D)
        for e in range(E):
            for name, shape in (("w1", (F, D)), ("w3", (F, D)), ("w2", (D, F))):
                shapes[f"block_sparse_moe.experts.{e}.{name}.weight"] = shape
    elif sparse:
        E, F = config["num_experts"], config["moe_intermediate_size"]
        shapes["mlp.gate.weight"] = (E, D)
        for e in range(E):
            for name, shape in (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F))):
                shapes[f"mlp.experts.{e}.{name}.weight"] = shape
    else:
        shapes |= dense
    if config.get("enable_moe_block"):
        E, F = config["num_experts"], config["moe_intermediate_size"]
        shapes |= {
            "router.proj.weight": (E, D),
            "router.scale": (D,),
            "router.per_expert_scale": (E,),
            "experts.gate_up_proj": (E, 2 * F, D),
            "experts.down_proj": (E, D, F),
            "pre_feedforward_layernorm_2.weight": (D,),
            "post_feedforward_layernorm_1.weight": (D,),
            "post_feedforward_layernorm_2.weight": (D,),
        }
    return shapes


def family_tensors(config: dict[str, Any], alike_experts: bool = True) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint by its Hugging Face name. Scales are large enough that attention is peaked and
    every bias, norm and expert matters. `alike_experts`: the last two are the same expert, so that routing has ties."""
    V, D = config["vocab_size"], config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _layer_shapes(config, i).items()}
    shapes["model.norm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    centre = 0.0 if config["model_type"] in ("gemma2", "gemma3_text") else 1.0  # of norms that scale by 1 + weight

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        if "norm" in name:
            return centre + 0.3 * x
        if "scale" in name or "scalar" in name:
            return 1 + 0.3 * x
        return x if "embed" in name else 0.3 * x

    tensors = {name: values(name, shape) for name, shape in shapes.items()}
    if alike_experts:
        _make_alike(tensors)
    return tensors


def _make_alike(tensors: dict[str, np.ndarray]) -> None:
    """The last two experts become the same expert with the same router row: ties, whose order cannot matter."""
    for name, x in tensors.items():
        if name.endswith(
            ("router.proj.weight", "router.per_expert_scale", "experts.gate_up_proj", "experts.down_proj")
        ):
            x[-1] = x[-2]
        elif name.endswith(".gate.weight"):
            x[-1] = x[-2]
            last = len(x) - 1
            experts = name.removesuffix("gate.weight") + "experts."
            for other in [n for n in tensors if n.startswith(f"{experts}{last}.")]:
                tensors[other][...] = tensors[other.replace(f"{experts}{last}.", f"{experts}{last - 1}.")]


# Text variant: model_type of the multimodal checkpoint, what its text tensors begin with, a tensor of its tower.
MULTIMODAL = {
    "gemma3": ("gemma3", "language_model.model.", "vision_tower.encoder.weight"),
    "gemma4_experts": ("gemma4", "model.language_model.", "model.vision_tower.encoder.weight"),
}


def multimodal(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config.json, tensors) of a multimodal checkpoint whose text part is the variant `name`, with one tensor of a
    vision tower."""
    model_type, prefix, tower = MULTIMODAL[name]
    text = family_config(name)
    config = {
        "architectures": [text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": model_type,
        "text_config": {k: v for k, v in text.items() if k != "architectures"},
        "tie_word_embeddings": True,
        "eos_token_id": [2, 5],
        "vision_config": {"hidden_size": 16},
    }
    tensors = {prefix + n.removeprefix("model."): x for n, x in family_tensors(text).items()}
    return config, tensors | {tower: np.ones((2, 2), np.float32)}


def trained_mask(length: int) -> np.ndarray:
    """(length - 1,) bool: which of the next tokens count in the masked log-likelihood."""
    return np.random.default_rng(11).random(length - 1) < 0.6


def gradient_sketch(grads: dict[str, np.ndarray]) -> np.ndarray:
    """What is committed of gradients, (tensors by name, 4): the norm of each and its products with three fixed random
    arrays of about its own size."""
    rows = []
    for name in sorted(grads):
        g, rng = grads[name].astype(np.float64), np.random.default_rng(zlib.crc32(name.encode()))
        products = [(g * rng.standard_normal(g.shape)).sum() for _ in range(3)]
        rows.append([np.linalg.norm(g), *products])
    return np.array(rows)
