"""Reading a config.json field by field: each one is used, known to change nothing, required to hold the one value
that the decoder computes, or refused by name.

A family lists its fields and builds its ModelSpec from these readers. Old and new places of the rope settings
(transformers 4 and 5) are both read here. LongRoPE is left out.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from burnish.models.errors import ModelError
from burnish.models.spec import LayerKind, RopeSpec, shortest_pattern

Config = Mapping[str, Any]

# Fields of every decoder.
COMMON = frozenset(
    {
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
    }
)

# Fields that may be there with exactly one meaning: that of not being there.
ONLY: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0,),
    "attention_dropout": (0.0,),
    "is_decoder": (True, False),
}

# Fields that do not change what the network computes: bookkeeping, training options of other programs, and
# generation defaults that old versions of transformers wrote into config.json (generation_config.json is where they
# count).
_HARMLESS = re.compile(
    r"_.*|transformers.*|unsloth_.*|(bos|eos|pad|unk|sep|decoder_start)_token_id|torch_dtype|dtype|use_cache"
    r"|initializer_range|is_llama_config|id2label|label2id|num_labels|return_dict|problem_type|task_specific_params"
    r"|max_length|min_length|max_sequence_length|model_max_length|temperature|top_k|top_p|typical_p|num_beams"
    r"|num_beam_groups|num_return_sequences|repetition_penalty|length_penalty|diversity_penalty|do_sample"
    r"|early_stopping|tokenizer_class|output_router_logits|router_aux_loss_coef|cache_implementation"
)

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def check_fields(
    config: Config,
    what: str,
    *,
    architectures: Collection[str],
    used: Collection[str],
    only: Mapping[str, tuple[Any, ...]],
) -> None:
    """Raise ModelError for a field that would change the model and that nobody reads. `what` names the family;
    `used` and `only` are its own fields beside COMMON and ONLY."""
    found = config.get("architectures") or architectures
    if not set(found) & set(architectures):
        raise ModelError(f"config.json: architectures is {found}, {', '.join(architectures)} is supported")
    single = {**ONLY, **only}
    for field, value in config.items():
        if field in used or field in COMMON:
            continue
        if field in single:
            if value is not None and value not in single[field]:
                raise ModelError(f"config.json: {field} is {value!r}; only {single[field][0]!r} is supported")
        elif not _HARMLESS.fullmatch(field) and value:
            raise ModelError(
                f"config.json: {field} is {value!r}, which this {what} decoder does not know; "
                "remove the field if it does not change what the model computes"
            )


def positive(config: Config, field: str, *, default: int | None = None) -> int:
    """A whole number above 0."""
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {field} is {value!r}, a whole number above 0 is needed")
    return value


def number(config: Config, field: str, default: float | None, where: str = "") -> float:
    """A number above 0; without a default it must be there."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {where}{field} is {value!r}, a number above 0 is needed")
    return float(value)


def optional_number(config: Config, field: str) -> float | None:
    """A number above 0, or None where it is not there."""
    return None if config.get(field) is None else number(config, field, None)


def flag(config: Config, field: str, default: bool = False) -> bool:
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {field} is {value!r}, true or false is needed")
    return default if value is None else value


def sizes(config: Config, *, kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, Any]:
    """The ModelSpec fields that every family has, `family` and `rope` left out. `kv_heads` and `head_dim` are the
    family's defaults; where it has none, as many kv heads as heads and the width divided by the heads."""
    D, H = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    K = positive(config, "num_key_value_heads", default=kv_heads or H)
    if H % K:
        raise ModelError(f"config.json: num_attention_heads ({H}) is not a multiple of num_key_value_heads ({K})")
    if config.get("head_dim") is None and head_dim is None and D % H:
        raise ModelError(
            f"config.json: hidden_size ({D}) is not a multiple of num_attention_heads ({H}) and there is no head_dim"
        )
    N = positive(config, "head_dim", default=head_dim or D // H)
    if N % 2:
        raise ModelError(f"config.json: head_dim is {N}; rotary embedding needs an even width")
    return {
        "num_layers": positive(config, "num_hidden_layers"),
        "d_model": D,
        "num_heads": H,
        "num_kv_heads": K,
        "head_dim": N,
        "d_mlp": positive(config, "intermediate_size"),
        "vocab_size": positive(config, "vocab_size"),
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-6),
    }


def pattern(
    config: Config,
    num_layers: int,
    kinds: Mapping[str, LayerKind],
    default: Sequence[str],
) -> tuple[LayerKind, ...]:
    """The pattern of `layer_types` ("full_attention", …), or of `default` where config.json has none."""
    types = config.get("layer_types")
    types = default if types is None else types
    if len(types) != num_layers:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for num_hidden_layers {num_layers}")
    unknown = sorted(set(types) - set(kinds))
    if unknown:
        raise ModelError(f"config.json: layer_types has {unknown[0]!r}; {', '.join(kinds)} are supported")
    return shortest_pattern([kinds[t] for t in types])


def rope(config: Config, default_theta: float = 10_000.0) -> RopeSpec:
    """Rope settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
    (transformers 4); where a file has both they must say the same.
    """
    found = {
        place: _rope_from(config, place, default_theta)
        for place in ("rope_parameters", "rope_scaling")
        if config.get(place) is not None
    }
    if not found:
        return RopeSpec(theta=number(config, "rope_theta", default_theta))
    if len(set(found.values())) > 1:
        raise ModelError(
            f"config.json: rope_parameters ({config['rope_parameters']}) and "
            f"rope_scaling ({config['rope_scaling']}) "
            f"with rope_theta ({config.get('rope_theta')}) disagree; keep the one that is right"
        )
    return next(iter(found.values()))


def _rope_from(config: Config, place: str, default_theta: float) -> RopeSpec:
    settings: Config = config[place]
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json: {place} is {settings!r}, an object is needed")
    outer, inner = config.get("rope_theta"), settings.get("rope_theta")
    if outer is not None and inner is not None and outer != inner:
        raise ModelError(f"config.json: rope_theta is {outer} and {place}.rope_theta is {inner}; which is right?")
    theta = number({"rope_theta": outer if inner is None else inner}, "rope_theta", default_theta)
    # transformers 5 may keep the original length beside the rope settings instead of in them.
    outer_length = config.get("original_max_position_embeddings")
    return rope_from({"original_max_position_embeddings": outer_length, **settings}, theta, place)


def rope_from(settings: Config, theta: float, place: str) -> RopeSpec:
    """RopeSpec of one object of rope settings; `place` is its name in messages.

    "dynamic" scaling changes nothing up to max_position_embeddings, beyond which no row goes, so it is the default.
    """
    kind = settings.get("rope_type", settings.get("type")) or "default"
    if kind not in _ROPE_FIELDS:
        raise ModelError(f"config.json: {place}.rope_type is {kind!r}; {', '.join(_ROPE_FIELDS)} are supported")
    known = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", *_ROPE_FIELDS[kind]}
    known |= set(_YARN_OPTIONAL) if kind == "yarn" else set()
    for field, value in settings.items():
        if field not in known and value is not None and (field, value) != ("partial_rotary_factor", 1.0):
            raise ModelError(f"config.json: {place}.{field} is {value!r}, which rope_type {kind!r} does not have")
    read = {field: number(settings, field, None, f"{place}.") for field in _ROPE_FIELDS[kind]}
    if kind == "linear":
        return RopeSpec(theta, "linear", read["factor"])
    if kind == "llama3":
        low, high = read["low_freq_factor"], read["high_freq_factor"]
        if low >= high:
            raise ModelError(f"config.json: {place}.low_freq_factor ({low}) must be below high_freq_factor ({high})")
        original = int(read["original_max_position_embeddings"])
        return RopeSpec(theta, "llama3", read["factor"], low, high, original)
    if kind == "yarn":
        return replace(
            RopeSpec(theta, "yarn", read["factor"]),
            original_max_positions=int(read["original_max_position_embeddings"]),
            beta_fast=number(settings, "beta_fast", 32.0, f"{place}."),
            beta_slow=number(settings, "beta_slow", 1.0, f"{place}."),
            truncate=flag(settings, "truncate", True),
            magnitude=_yarn_magnitude(settings, read["factor"], place),
        )
    return RopeSpec(theta)


def _yarn_magnitude(settings: Config, factor: float, place: str) -> float:
    """Peng et al. 2023, section 3.4, equation 22, or what the file says instead."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return number(settings, "attention_factor", None, f"{place}.")
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return of(settings["mscale"]) / of(settings["mscale_all_dim"])
    return of(1.0)
