"""Tiny random Llama checkpoints, one per variation of the architecture, written without any code of burnish.

Names and shapes are those of transformers' LlamaForCausalLM (make_references.py loads them there,
strictly). Weights come from NumPy's generator, seeded by tensor name, so the reference script and the
tests make the same ones.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors needs)
import numpy as np
from safetensors.numpy import save_file

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 64,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped_query": {},
    "multi_query": {"num_key_value_heads": 1},
    "multi_head": {"num_key_value_heads": None},
    "tied_head": {"tie_word_embeddings": True},
    "nine_heads_three_kv_heads": {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3},
    "head_dim_not_width_over_heads": {"head_dim": 16},
    "large_eps": {"rms_norm_eps": 1e-2},
    "theta_old_place": {"rope_theta": 100.0},
    "theta_new_place": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "llama3_rope_old_place": {"rope_theta": 500.0, "rope_scaling": _LLAMA3},
    "llama3_rope_new_place": {"rope_theta": None, "rope_parameters": _LLAMA3 | {"rope_theta": 500.0}},
    "linear_rope_old_place": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear_rope_new_place": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "all_biases_tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}


def variant_config(name: str) -> dict[str, Any]:
    """config.json of a variant; a field set to None there is left out."""
    return {k: v for k, v in (BASE | VARIANTS[name]).items() if v is not None}


def random_tensors(config: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint by its Hugging Face name. Scales are large enough that attention is
    peaked and every bias and norm matters.
    """
    D, F, V, H = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"))
    K, N = config.get("num_key_value_heads", H), config.get("head_dim", D // H)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        linears = {
            "self_attn.q_proj": (H * N, D),
            "self_attn.k_proj": (K * N, D),
            "self_attn.v_proj": (K * N, D),
            "self_attn.o_proj": (D, H * N),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
        }
        for name, shape in linears.items():
            shapes[f"{p}{name}.weight"] = shape
            if config.get("attention_bias" if "attn" in name else "mlp_bias"):
                shapes[f"{p}{name}.bias"] = shape[:1]
        shapes |= {f"{p}input_layernorm.weight": (D,), f"{p}post_attention_layernorm.weight": (D,)}
    shapes["model.norm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        if "norm" in name:
            return 1 + 0.3 * x
        return x if "embed" in name else 0.3 * x

    return {name: values(name, shape).astype(dtype) for name, shape in shapes.items()}


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    shards: int = 1,
) -> Path:
    """A checkpoint directory as the hub has them: weights in `shards` files, config, generation config and
    the side files of a tokenizer (their content is never read here).
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 5],\n  "temperature":0.6}')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "tokenizer_config.json").write_text('{"eos_token":"é"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}\n")
    (directory / "LICENSE").write_text("terms\n")
    (directory / "README.md").write_text("# a model card\n")
    (directory / "pytorch_model.bin.index.json").write_text("{}")
    meta = {"format": "pt"}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", meta)
        return directory
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({n: tensors[n] for n in part}, directory / file, meta)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def probe_tokens(config: dict[str, Any], length: int = 48) -> np.ndarray:
    """(1, length) int32, longer than the original context of the scaled variants."""
    return np.random.default_rng(7).integers(3, config["vocab_size"], (1, length)).astype(np.int32)
