"""config.json -> ModelSpec: every field counts, is known not to, or is refused by name."""

from dataclasses import replace

import pytest
from llama_variants import BASE, VARIANTS, random_tensors, variant_config

from burnish.models.errors import ModelError
from burnish.models.families import PRESETS, preset_config, resolve_config, spec_from_hf, tensor_map
from burnish.models.params import num_params
from burnish.models.rope import inverse_frequencies
from burnish.models.spec import RopeSpec

LLAMA31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_sizes_are_those_of_the_config():
    spec = spec_from_hf(BASE | {"head_dim": 16, "rms_norm_eps": 1e-3, "attention_bias": True})
    assert (spec.num_layers, spec.d_model, spec.num_heads, spec.num_kv_heads) == (2, 32, 4, 2)
    assert (spec.head_dim, spec.d_mlp, spec.vocab_size, spec.max_positions) == (16, 48, 64, 128)
    assert spec.rms_norm_eps == 1e-3
    assert spec.attention_bias
    assert not spec.mlp_bias
    assert not spec.tied_head


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, RopeSpec(1e4)),
        ({"rope_theta": None}, RopeSpec(1e4)),
        ({"rope_scaling": None, "rope_theta": 5e5}, RopeSpec(5e5)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeSpec(1e4)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(1e4, "linear", 2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA31 | {"rope_type": "llama3"}},
            RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_theta": None, "rope_parameters": LLAMA31 | {"rope_type": "llama3", "rope_theta": 5e5}},
            RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        # Up to max_position_embeddings it changes nothing.
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, RopeSpec(1e4)),
        # Both places, saying the same.
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": LLAMA31 | {"rope_type": "llama3"},
                "rope_parameters": LLAMA31 | {"rope_type": "llama3", "rope_theta": 5e5},
            },
            RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_is_read_from_the_old_and_the_new_place(fields, rope):
    assert spec_from_hf(BASE | fields).rope == rope


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"model_type": "mamba"}, ["model_type", "mamba", "llama"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["architectures"]),
        ({"pretraining_tp": 2}, ["pretraining_tp", "2"]),
        ({"sliding_window": 4096}, ["sliding_window", "4096"]),
        ({"attention_dropout": 0.1}, ["attention_dropout"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_interleaved": True}, ["rope_interleaved"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"qk_norm": True}, ["qk_norm"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"hidden_size": 30}, ["hidden_size (30)", "num_attention_heads (4)", "head_dim"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"num_hidden_layers": 2.0}, ["num_hidden_layers"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["rope_scaling.rope_type", "longrope"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, ["rope_scaling.original_max_position_embeddings"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling.low_freq_factor"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, ["beta_fast"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, ["rope_theta is 10000", "5.0"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            ["rope_parameters", "rope_scaling", "disagree"],
        ),
        ({"rope_scaling": LLAMA31 | {"rope_type": "llama3", "low_freq_factor": 4.0}}, ["low_freq_factor"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields, named):
    config = {k: v for k, v in (BASE | fields).items() if v is not None}
    with pytest.raises(ModelError) as error:
        spec_from_hf(config)
    for part in named:
        assert part in str(error.value)


def test_fields_that_change_nothing_are_accepted():
    harmless = {
        "transformers_version": "4.42.3",
        "transformers.js_config": {"dtype": "q4"},
        "_attn_implementation_autoset": True,
        "is_llama_config": True,
        "rope_interleaved": False,
        "use_cache": True,
        "pretraining_tp": 1,
        "attention_dropout": 0.0,
        "initializer_range": 0.04,
        "pad_token_id": 2,
        "sliding_window": None,
        "temperature": 1.0,
    }
    assert spec_from_hf(BASE | harmless) == spec_from_hf(BASE)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as published on the models' cards and in the papers
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
    ],
)
def test_presets_have_the_published_sizes(name, parameters):
    assert num_params(spec_from_hf(preset_config(name))) == parameters


def test_every_preset_is_a_config_that_is_read_and_instruct_has_the_shape_of_its_base():
    for name in PRESETS:
        spec = spec_from_hf(preset_config(name))
        base = name.removesuffix("-Instruct").removesuffix("-it")
        if base in PRESETS:
            # Qwen 2.5's differ in their longest context, and the large ones in eps.
            same = replace(spec_from_hf(preset_config(base)), max_positions=spec.max_positions)
            assert spec == (replace(same, rms_norm_eps=spec.rms_norm_eps) if spec.family == "qwen2" else same)


def test_llama31_frequencies_are_scaled_where_they_are_long():
    freq = inverse_frequencies(RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 128)
    plain = inverse_frequencies(RopeSpec(5e5), 128)
    wavelength = 2 * 3.141592653589793 / plain
    assert (freq[wavelength < 8192 / 4] == plain[wavelength < 8192 / 4]).all()
    long = wavelength > 8192
    assert (abs(freq[long] * 8 / plain[long] - 1) < 1e-6).all()


def test_a_preset_serves_a_checkpoint_without_config():
    assert resolve_config("llama3.2-1b", None, "here")["hidden_size"] == 2048


def test_a_preset_that_disagrees_names_the_fields_with_both_values():
    config = preset_config("llama3.2-1b") | {"hidden_size": 1024, "rope_theta": 1e4}
    with pytest.raises(ModelError, match=r"hidden_size is 1024 there and 2048 in llama3\.2-1b") as error:
        resolve_config("llama3.2-1b", config, "here")
    assert "rope_theta is 10000.0 there and 500000.0 in llama3.2-1b" in str(error.value)
    assert "num_hidden_layers" not in str(error.value)


def test_neither_config_nor_name_and_unknown_names_are_errors():
    with pytest.raises(ModelError, match="model_name="):
        resolve_config(None, None, "here")
    with pytest.raises(ModelError, match=r"llama3\.1-8b"):
        preset_config("llama31-8b")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_tensor_map_is_the_checkpoint_and_its_own_inverse(name):
    config = variant_config(name)
    tensors = random_tensors(config)
    mappings = tensor_map(spec_from_hf(config))
    assert {m.name: m.hf_shape for m in mappings} == {n: t.shape for n, t in tensors.items()}
    for m in mappings:
        assert (m.to_hf(m.to_tree(tensors[m.name])) == tensors[m.name]).all()
