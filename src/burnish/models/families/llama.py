"""The Llama family: what transformers' LlamaForCausalLM computes. Llama 2 and 3.x, SmolLM2 and anything else of that
class.

Presets are the published models by the names of the tutorials, each as the config.json that its checkpoint has. A
preset serves a checkpoint directory that has no config.json, and tells whether one that has is the model that was
asked for. Instruct models differ from base models in their stop tokens only. The embedded model is no preset: its
config.json always comes with it (burnish.data.tiny).
"""

from collections.abc import Mapping
from typing import Any

from burnish.models.families import config as read
from burnish.models.families.family import Family
from burnish.models.families.tensors import decoder_map
from burnish.models.spec import ModelSpec

ARCHITECTURE = "LlamaForCausalLM"


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json of a Llama-family model -> its ModelSpec. Raises ModelError naming the field that is
    missing, impossible, or asks for something that the decoder does not compute.
    """
    read.check_fields(
        config,
        "Llama",
        architectures=(ARCHITECTURE,),
        used=("attention_bias", "mlp_bias"),
        only={"hidden_act": ("silu",), "pretraining_tp": (1,)},
    )
    return ModelSpec(
        family="llama",
        **read.sizes(config),
        tied_head=read.flag(config, "tie_word_embeddings"),
        max_positions=read.positive(config, "max_position_embeddings", default=2048),
        rope=read.rope(config),
        attention_bias=read.flag(config, "attention_bias"),
        output_bias=read.flag(config, "attention_bias"),
        mlp_bias=read.flag(config, "mlp_bias"),
    )


def _llama(
    layers: int,
    d_model: int,
    heads: int,
    kv_heads: int,
    d_mlp: int,
    *,
    vocab: int,
    theta: float,
    positions: int,
    bos: int,
    eos: int | list[int],
    rope_factor: float | None = None,
    tied: bool = False,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """A LlamaForCausalLM config.json, with the field names that transformers 4 and 5 both read."""
    scaling = {
        "factor": rope_factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return {
        "architectures": [ARCHITECTURE],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "head_dim": d_model // heads,
        "hidden_act": "silu",
        "hidden_size": d_model,
        "initializer_range": 0.02,
        "intermediate_size": d_mlp,
        "max_position_embeddings": positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None if rope_factor is None else scaling,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab,
    }


_LLAMA2: dict[str, Any] = {
    "vocab": 32_000,
    "theta": 1e4,
    "positions": 4096,
    "bos": 1,
    "eos": 2,
    "dtype": "float16",
}
_LLAMA3: dict[str, Any] = {
    "vocab": 128_256,
    "theta": 5e5,
    "positions": 8192,
    "bos": 128_000,
    "eos": 128_001,
}
_LLAMA31 = _LLAMA3 | {"positions": 131_072, "rope_factor": 8.0}
_LLAMA32 = _LLAMA31 | {"rope_factor": 32.0, "tied": True}
_LLAMA3_INSTRUCT = {"eos": 128_009}
_LLAMA31_INSTRUCT = {"eos": [128_001, 128_008, 128_009]}
_SMOLLM2: dict[str, Any] = {
    "vocab": 49_152,
    "theta": 1e5,
    "positions": 8192,
    "bos": 0,
    "eos": 0,
    "tied": True,
}
_SMOLLM2_INSTRUCT = {"bos": 1, "eos": 2}

# layers, width, heads, kv heads, mlp
_L8B = (32, 4096, 32, 8, 14_336)
_L70B = (80, 8192, 64, 8, 28_672)
_L1B = (16, 2048, 32, 8, 8192)
_L3B = (28, 3072, 24, 8, 8192)
_S135M = (30, 576, 9, 3, 1536)
_S360M = (32, 960, 15, 5, 2560)
_S1700M = (24, 2048, 32, 32, 8192)

_PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": _llama(32, 4096, 32, 32, 11_008, **_LLAMA2),
    "llama2-13b": _llama(40, 5120, 40, 40, 13_824, **_LLAMA2),
    "llama2-70b": _llama(*_L70B, **_LLAMA2),
    "llama3-8b": _llama(*_L8B, **_LLAMA3),
    "llama3-8b-Instruct": _llama(*_L8B, **_LLAMA3 | _LLAMA3_INSTRUCT),
    "llama3-70b": _llama(*_L70B, **_LLAMA3),
    "llama3-70b-Instruct": _llama(*_L70B, **_LLAMA3 | _LLAMA3_INSTRUCT),
    "llama3.1-8b": _llama(*_L8B, **_LLAMA31),
    "llama3.1-8b-Instruct": _llama(*_L8B, **_LLAMA31 | _LLAMA31_INSTRUCT),
    "llama3.1-70b": _llama(*_L70B, **_LLAMA31),
    "llama3.1-70b-Instruct": _llama(*_L70B, **_LLAMA31 | _LLAMA31_INSTRUCT),
    "llama3.2-1b": _llama(*_L1B, **_LLAMA32),
    "llama3.2-1b-Instruct": _llama(*_L1B, **_LLAMA32 | _LLAMA31_INSTRUCT),
    "llama3.2-3b": _llama(*_L3B, **_LLAMA32),
    "llama3.2-3b-Instruct": _llama(*_L3B, **_LLAMA32 | _LLAMA31_INSTRUCT),
    "llama3.3-70b-Instruct": _llama(*_L70B, **_LLAMA31 | _LLAMA31_INSTRUCT),
    "smollm2-135m": _llama(*_S135M, **_SMOLLM2),
    "smollm2-135m-Instruct": _llama(*_S135M, **_SMOLLM2 | _SMOLLM2_INSTRUCT),
    "smollm2-360m": _llama(*_S360M, **_SMOLLM2),
    "smollm2-360m-Instruct": _llama(*_S360M, **_SMOLLM2 | _SMOLLM2_INSTRUCT),
    "smollm2-1.7b": _llama(*_S1700M, **_SMOLLM2 | {"theta": 1.3e5}),
    "smollm2-1.7b-Instruct": _llama(*_S1700M, **_SMOLLM2 | {"theta": 1.3e5} | _SMOLLM2_INSTRUCT),
}

FAMILY = Family(("llama",), spec_from_hf, decoder_map, presets=_PRESETS)
