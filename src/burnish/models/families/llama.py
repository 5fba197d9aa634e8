"""The Llama family: config.json -> ModelSpec, and tensor names <-> parameter tree.

Covers what transformers' LlamaForCausalLM computes: Llama 2 and 3.x, SmolLM2 and anything else of that
class. A config.json is read field by field: each one is used, known to change nothing, required to hold
the one value that the decoder computes, or refused by name. Dynamic, YaRN and LongRoPE scaling are left
out.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from burnish.models.errors import ModelError
from burnish.models.families.tensors import TensorMapping
from burnish.models.rope import inverse_frequencies
from burnish.models.spec import ModelSpec, RopeSpec

FAMILY = "llama"
ARCHITECTURE = "LlamaForCausalLM"

_USED = {
    "model_type",
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
}

# Fields that may be there with exactly one meaning: that of not being there.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,),
    "attention_dropout": (0.0,),
    "is_decoder": (True, False),
}

# Fields that do not change what the network computes: bookkeeping, and generation defaults that old
# versions of transformers wrote into config.json (generation_config.json is where they count).
_HARMLESS = re.compile(
    r"_.*|transformers.*|unsloth_.*|(bos|eos|pad|unk|sep|decoder_start)_token_id|torch_dtype|dtype|use_cache"
    r"|initializer_range|is_llama_config|id2label|label2id|num_labels|return_dict|problem_type|task_specific_params"
    r"|max_length|min_length|max_sequence_length|model_max_length|temperature|top_k|top_p|typical_p|num_beams"
    r"|num_beam_groups|num_return_sequences|repetition_penalty|length_penalty|diversity_penalty|do_sample"
    r"|early_stopping|tokenizer_class"
)

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """config.json of a Llama-family model -> its ModelSpec. Raises ModelError naming the field that is
    missing, impossible, or asks for something that the decoder does not compute.
    """
    if ARCHITECTURE not in (config.get("architectures") or [ARCHITECTURE]):
        raise ModelError(
            f"config.json: architectures is {config['architectures']}, {ARCHITECTURE} is supported"
        )
    for field, value in config.items():
        if field in _ONLY:
            if value is not None and value not in _ONLY[field]:
                raise ModelError(f"config.json: {field} is {value!r}; only {_ONLY[field][0]!r} is supported")
        elif field not in _USED and not _HARMLESS.fullmatch(field) and value:
            raise ModelError(
                f"config.json: {field} is {value!r}, which this Llama decoder does not know; "
                "remove the field if it does not change what the model computes"
            )

    D, H = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    K = _positive(config, "num_key_value_heads", default=H)
    if H % K:
        raise ModelError(
            f"config.json: num_attention_heads ({H}) is not a multiple of num_key_value_heads ({K})"
        )
    if config.get("head_dim") is None and D % H:
        raise ModelError(
            f"config.json: hidden_size ({D}) is not a multiple of num_attention_heads ({H}) "
            "and there is no head_dim"
        )
    N = _positive(config, "head_dim", default=D // H)
    if N % 2:
        raise ModelError(f"config.json: head_dim is {N}; rotary embedding needs an even width")
    return ModelSpec(
        family=FAMILY,
        num_layers=_positive(config, "num_hidden_layers"),
        d_model=D,
        num_heads=H,
        num_kv_heads=K,
        head_dim=N,
        d_mlp=_positive(config, "intermediate_size"),
        vocab_size=_positive(config, "vocab_size"),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        tied_head=_flag(config, "tie_word_embeddings"),
        max_positions=_positive(config, "max_position_embeddings", default=2048),
        rope=_rope(config),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
    )


def _positive(config: Mapping[str, Any], field: str, *, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {field} is {value!r}, a whole number above 0 is needed")
    return value


def _number(config: Mapping[str, Any], field: str, default: float | None, where: str = "") -> float:
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {where}{field} is {value!r}, a number above 0 is needed")
    return float(value)


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {field} is {value!r}, true or false is needed")
    return bool(value)


def _rope(config: Mapping[str, Any]) -> RopeSpec:
    """Rope settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
    (transformers 4); where a file has both they must say the same.
    """
    found = {
        place: _rope_from(config, place)
        for place in ("rope_parameters", "rope_scaling")
        if config.get(place) is not None
    }
    if not found:
        return RopeSpec(theta=_number(config, "rope_theta", 10_000.0))
    if len(set(found.values())) > 1:
        raise ModelError(
            f"config.json: rope_parameters ({config['rope_parameters']}) and "
            f"rope_scaling ({config['rope_scaling']}) "
            f"with rope_theta ({config.get('rope_theta')}) disagree; keep the one that is right"
        )
    return next(iter(found.values()))


def _rope_from(config: Mapping[str, Any], place: str) -> RopeSpec:
    settings: Mapping[str, Any] = config[place]
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json: {place} is {settings!r}, an object is needed")
    kind: Literal["default", "linear", "llama3"] = (
        settings.get("rope_type", settings.get("type")) or "default"
    )
    if kind not in _ROPE_FIELDS:
        raise ModelError(
            f"config.json: {place}.rope_type is {kind!r}; {', '.join(_ROPE_FIELDS)} are supported"
        )
    outer, inner = config.get("rope_theta"), settings.get("rope_theta")
    if outer is not None and inner is not None and outer != inner:
        raise ModelError(
            f"config.json: rope_theta is {outer} and {place}.rope_theta is {inner}; which is right?"
        )
    theta = _number({"rope_theta": outer if inner is None else inner}, "rope_theta", 10_000.0)

    known = {"rope_type", "type", "rope_theta", *_ROPE_FIELDS[kind]}
    for field, value in settings.items():
        if field not in known and value is not None and (field, value) != ("partial_rotary_factor", 1.0):
            raise ModelError(
                f"config.json: {place}.{field} is {value!r}, which rope_type {kind!r} does not have"
            )
    # transformers 5 may keep the original length beside the rope settings instead of in them.
    outer_length = config.get("original_max_position_embeddings")
    values = {"original_max_position_embeddings": outer_length, **settings}
    read = {field: _number(values, field, None, f"{place}.") for field in _ROPE_FIELDS[kind]}
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", read["factor"])
    low, high = read["low_freq_factor"], read["high_freq_factor"]
    if low >= high:
        raise ModelError(
            f"config.json: {place}.low_freq_factor ({low}) must be below high_freq_factor ({high})"
        )
    return RopeSpec(theta, "llama3", read["factor"], low, high, int(read["original_max_position_embeddings"]))


def tensor_map(spec: ModelSpec) -> list[TensorMapping]:
    """Every tensor of the checkpoint, in file order, and its place in the tree."""
    L, D, H, K, N, F, V = (
        spec.num_layers,
        spec.d_model,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.d_mlp,
        spec.vocab_size,
    )
    # Name inside a layer -> key in the tree, shape in the file, shape after the split, transpose.
    layer: list[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
        ("input_layernorm.weight", "input_norm", (D,), (D,), (0,)),
        ("self_attn.q_proj.weight", "q_proj", (H * N, D), (H, N, D), (2, 0, 1)),
        ("self_attn.k_proj.weight", "k_proj", (K * N, D), (K, N, D), (2, 0, 1)),
        ("self_attn.v_proj.weight", "v_proj", (K * N, D), (K, N, D), (2, 0, 1)),
        ("self_attn.o_proj.weight", "o_proj", (D, H * N), (D, H, N), (1, 2, 0)),
        ("post_attention_layernorm.weight", "post_attention_norm", (D,), (D,), (0,)),
        ("mlp.gate_proj.weight", "gate_proj", (F, D), (F, D), (1, 0)),
        ("mlp.up_proj.weight", "up_proj", (F, D), (F, D), (1, 0)),
        ("mlp.down_proj.weight", "down_proj", (D, F), (D, F), (1, 0)),
    ]
    if spec.attention_bias:
        layer += [
            ("self_attn.q_proj.bias", "q_bias", (H * N,), (H, N), (0, 1)),
            ("self_attn.k_proj.bias", "k_bias", (K * N,), (K, N), (0, 1)),
            ("self_attn.v_proj.bias", "v_bias", (K * N,), (K, N), (0, 1)),
            ("self_attn.o_proj.bias", "o_bias", (D,), (D,), (0,)),
        ]
    if spec.mlp_bias:
        layer += [
            ("mlp.gate_proj.bias", "gate_bias", (F,), (F,), (0,)),
            ("mlp.up_proj.bias", "up_bias", (F,), (F,), (0,)),
            ("mlp.down_proj.bias", "down_bias", (D,), (D,), (0,)),
        ]
    return [
        TensorMapping("model.embed_tokens.weight", ("embed",), None, (V, D), (V, D), (0, 1)),
        *(
            TensorMapping(f"model.layers.{i}.{name}", ("layers", key), i, *shapes)
            for i in range(L)
            for name, key, *shapes in layer
        ),
        TensorMapping("model.norm.weight", ("final_norm",), None, (D,), (D,), (0,)),
        *([] if spec.tied_head else [_head(spec, "lm_head")]),
    ]


def tied_head_copy(spec: ModelSpec) -> TensorMapping | None:
    """The lm_head that some files of tied models carry although it equals the embeddings: None for untied
    ones.
    """
    return _head(spec, "embed") if spec.tied_head else None


def _head(spec: ModelSpec, key: str) -> TensorMapping:
    shape = (spec.vocab_size, spec.d_model)
    return TensorMapping("lm_head.weight", (key,), None, shape, shape, (0, 1))


def buffer_values(spec: ModelSpec, name: str) -> list[np.ndarray] | None:
    """What a tensor that is no parameter may hold: the rotary frequencies that old versions of
    transformers saved, before or after scaling. None where `name` is no such buffer.
    """
    if not re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name):
        return None
    scaled = inverse_frequencies(spec.rope, spec.head_dim)
    return [scaled, inverse_frequencies(RopeSpec(spec.rope.theta), spec.head_dim)]
