"""config.json of the other families -> ModelSpec: old and new places, defaults, published sizes, refusals."""

import dataclasses

import pytest
from family_variants import VARIANTS, family_config

from burnish.models.errors import ModelError
from burnish.models.families import PRESETS, preset_config, resolve_config, spec_from_hf, tensor_map, text_only_config
from burnish.models.params import num_params
from burnish.models.rope import inverse_frequencies
from burnish.models.spec import LayerKind, RopeSpec, shortest_pattern


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as published on the models' cards
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("gemma2-2b", 2_614_341_888),
        ("gemma2-27b", 27_227_128_320),
        ("gemma3-270m", 268_098_176),
        ("gemma3-1b", 999_885_952),
    ],
)
def test_presets_have_the_published_sizes(name, parameters):
    assert num_params(spec_from_hf(preset_config(name))) == parameters


def test_gemma4_presets_are_the_tutorials_models():
    spec = spec_from_hf(PRESETS["gemma4-26b"])
    local, full = spec.at(0), spec.at(5)
    assert (spec.num_layers, spec.d_model, spec.d_mlp, spec.vocab_size) == (30, 2816, 2112, 262_144)
    assert (local.num_kv_heads, local.head_dim, local.window, local.rope) == (8, 256, 1024, RopeSpec(1e4))
    assert (full.num_kv_heads, full.head_dim, full.window) == (2, 512, None)
    assert full.keys_are_values
    assert (full.rope.theta, full.rope.rotated) == (1e6, 0.25)
    assert (spec.experts.num_experts, spec.experts.num_active, spec.experts.d_expert) == (128, 8, 704)
    assert 25.1e9 < num_params(spec) < 25.3e9
    assert 30.6e9 < num_params(spec_from_hf(PRESETS["gemma4-31b"])) < 30.8e9


def test_the_places_of_transformers_5_say_the_same_as_the_old_ones():
    config = family_config("gemma3_linear_rope")
    new = {k: v for k, v in config.items() if not k.startswith("rope") and k != "sliding_window_pattern"} | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2,
    }
    assert spec_from_hf(new) == spec_from_hf(config)
    config = family_config("gemma4")
    new = {k: v for k, v in config.items() if "global" not in k} | {
        "per_layer_config": {
            "05": {"head_dim": 16, "num_key_value_heads": 1},
            "11": {"num_key_value_heads": 1, "head_dim": 16},
        }
    }
    assert spec_from_hf(new) == spec_from_hf(config)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("qwen2", {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "1", "2"]),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, ["chunked_attention"]),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, ["dual_chunk_attention_config"]),
        ("qwen3_moe", {"num_experts_per_tok": 9}, ["num_experts_per_tok (9)", "num_experts (8)"]),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, ["shared_expert_intermediate_size"]),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, ["layer_types"]),
        ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma4", {"hidden_size_per_layer_input": 256}, ["hidden_size_per_layer_input", "E2B"]),
        ("gemma4", {"num_kv_shared_layers": 2}, ["num_kv_shared_layers"]),
        ("gemma4", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "all"]),
        ("gemma4", {"layer_types": ["sliding_attention"] * 12}, ["layer_types", "full_attention"]),
        ("gemma4", {"per_layer_config": {"3": {"head_dim": 16}}}, ["per_layer_config"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name, fields, named):
    with pytest.raises(ModelError) as error:
        spec_from_hf(family_config(name) | fields)
    for part in named:
        assert part in str(error.value)


def test_a_missing_per_layer_input_size_is_not_taken_for_none():
    """transformers takes 256 where the field is missing."""
    config = {k: v for k, v in family_config("gemma4").items() if k != "hidden_size_per_layer_input"}
    with pytest.raises(ModelError, match="hidden_size_per_layer_input is 256"):
        spec_from_hf(config)


def test_text_only_and_multimodal_checkpoints_are_the_same_model_by_name():
    text = PRESETS["gemma3-4b"]["text_config"] | {"architectures": ["Gemma3ForCausalLM"]}
    assert resolve_config("gemma3-4b", text, "here") == text


@pytest.mark.parametrize("name", PRESETS)
def test_the_text_part_alone_is_the_same_model_with_the_same_tensors(name):
    """Up to the beginning of their names."""
    whole = spec_from_hf(preset_config(name))
    alone = spec_from_hf(text_only_config(preset_config(name)))
    assert dataclasses.replace(alone, family=whole.family) == whole
    assert alone.family == (
        "gemma3_text" if whole.family == "gemma3" else whole.family.replace("gemma4", "gemma4_text")
    )
    for a, b in zip(tensor_map(alone), tensor_map(whole), strict=True):
        assert b.name.endswith(a.name.removeprefix("model."))
        assert a.hf_shape == b.hf_shape


def test_another_models_config_is_refused_with_the_fields_that_differ():
    with pytest.raises(ModelError) as error:
        resolve_config("qwen3-30b-a3b", preset_config("qwen3-8b"), "here")
    for part in ("model_type is qwen3", "num_experts is None there and 128", "hidden_size is 4096 there and 2048"):
        assert part in str(error.value)


def test_layers_that_differ_from_the_preset_are_told_by_field():
    config = preset_config("gemma3-1b") | {"sliding_window": 256}
    with pytest.raises(ModelError, match=r"layer_types: kinds of layers differ in sliding_window\. Leave"):
        resolve_config("gemma3-1b", config, "here")


def test_the_shortest_pattern_is_found_whether_or_not_it_divides_the_depth():
    a, b = LayerKind(window=4), LayerKind()
    assert shortest_pattern([a, a, a]) == (a,)
    assert shortest_pattern([a, b, a, b, a]) == (a, b)
    assert shortest_pattern([a, a, b, a, a, b, a, a]) == (a, a, b)
    assert shortest_pattern([b, a, a]) == (b, a, a)


def test_pairs_that_do_not_turn_have_frequency_zero_and_the_others_that_of_the_whole_width():
    full, part = inverse_frequencies(RopeSpec(1e4), 16), inverse_frequencies(RopeSpec(1e4, rotated=0.25), 16)
    assert (part[:2] == full[:2]).all()
    assert (part[2:] == 0).all()


def test_every_variant_names_its_own_family():
    for name in VARIANTS:
        assert spec_from_hf(family_config(name)).family == VARIANTS[name]["model_type"]
