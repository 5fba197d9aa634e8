"""Writing Hugging Face checkpoints: the source's files, the trained weights, and nothing half done."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exports import export, raw_tensors
from llama_variants import BASE, VARIANTS, random_tensors, variant_config, write_checkpoint
from memory import peak_above_start
from safetensors import safe_open
from safetensors.numpy import load_file

from burnish.checkpoints import targets
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.export_command import to_huggingface
from burnish.checkpoints.hf_export import snapshot_source
from burnish.checkpoints.hf_import import load_params
from burnish.checkpoints.store import TrainingStore
from burnish.config.schema import ExportConfig
from burnish.errors import BurnishError
from burnish.models.families import PRESETS, spec_from_hf
from burnish.models.params import ParamInfo, param_infos

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE",
)


def source_and_params(path, config=BASE, tensors=None, shards=1):
    source = write_checkpoint(path / "source", config, tensors or random_tensors(config), shards)
    snapshot_source(source, path / "snapshot")
    spec, params = load_params(source)
    return source, spec, params


def mixed(config):
    """Norms in float32, the rest in bfloat16, as some checkpoints are."""
    return {k: v if "norm" in k else v.astype(ml_dtypes.bfloat16) for k, v in random_tensors(config).items()}


ROUND_TRIPS = [(name, np.float32) for name in VARIANTS] + [
    (name, dtype)
    for name in ("grouped_query", "all_biases_tied")
    for dtype in (np.float16, ml_dtypes.bfloat16, "mixed")
]


@pytest.mark.parametrize(("name", "dtype"), ROUND_TRIPS)
def test_a_round_trip_without_training_is_bit_exact(name, dtype, tmp_path):
    config = variant_config(name)
    tensors = mixed(config) if dtype == "mixed" else random_tensors(config, dtype)
    source, _, params = source_and_params(tmp_path, config, tensors)
    out = export(params, tmp_path / "snapshot", tmp_path / "out")
    assert raw_tensors(out) == raw_tensors(source)
    for file in SIDE_FILES:
        assert (out / file).read_bytes() == (source / file).read_bytes()
    assert sorted(p.name for p in out.iterdir()) == sorted([*SIDE_FILES, "model.safetensors"])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tied_head_is_written_where_the_source_had_it_and_only_there(shards, tmp_path):
    config = variant_config("tied_head")
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source, _, params = source_and_params(tmp_path, config, tensors, shards)
    params["embed"] += 1  # as if trained
    written = raw_tensors(export(params, tmp_path / "snapshot", tmp_path / "out"))
    assert written.keys() == raw_tensors(source).keys()
    assert written["lm_head.weight"] == written["model.embed_tokens.weight"]
    assert written["lm_head.weight"][2] == params["embed"].tobytes()


def test_rotary_buffers_of_the_source_are_left_out(tmp_path):
    freq = (1e4 ** (-np.arange(0, 8, 2) / 8)).astype(np.float32)
    tensors = random_tensors(BASE)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": freq}
    _, _, params = source_and_params(tmp_path, BASE, tensors | extra)
    assert raw_tensors(export(params, tmp_path / "snapshot", tmp_path / "out")).keys() == tensors.keys()


@pytest.mark.parametrize("field", ["torch_dtype", "dtype", None])
@pytest.mark.parametrize("weight_dtype", ["float32", "float16", "bfloat16"])
def test_weight_dtype_changes_every_tensor_and_the_config_says_so(weight_dtype, field, tmp_path):
    config = {k: v for k, v in BASE.items() if k != "torch_dtype"} | ({field: "float64"} if field else {})
    source, _, params = source_and_params(tmp_path, config, mixed(config))
    out = export(params, tmp_path / "snapshot", tmp_path / "out", weight_dtype)
    want = np.dtype(getattr(ml_dtypes, weight_dtype, weight_dtype))
    for name, (dtype, _, data) in raw_tensors(out).items():
        values = np.frombuffer(raw_tensors(source)[name][2], raw_tensors(source)[name][0])
        assert (dtype, data) == (weight_dtype, values.astype(want).tobytes())
    assert json.loads((out / "config.json").read_text()) == config | {field or "torch_dtype": weight_dtype}
    for file in SIDE_FILES[1:]:
        assert (out / file).read_bytes() == (source / file).read_bytes()


def test_a_dtype_that_the_source_has_already_leaves_config_json_as_it_is(tmp_path):
    source, _, params = source_and_params(tmp_path)
    out = export(params, tmp_path / "snapshot", tmp_path / "out", "float32")
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_parameters_on_a_device_and_in_bfloat16_keep_the_source_dtype(tmp_path):
    source, _, params = source_and_params(tmp_path)
    on_device = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), params)
    written = raw_tensors(export(on_device, tmp_path / "snapshot", tmp_path / "out"))
    for name, (dtype, shape, data) in raw_tensors(source).items():
        rounded = np.frombuffer(data, dtype).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert written[name] == ("float32", shape, rounded.tobytes())


@pytest.mark.parametrize("source_shards", [1, 3])
def test_shards_are_at_most_the_limit_and_the_index_lists_each_tensor_once(source_shards, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "MAX_SHARD_BYTES", 20_000)
    source, spec, params = source_and_params(tmp_path, shards=source_shards)
    out = export(params, tmp_path / "snapshot", tmp_path / "out")
    assert raw_tensors(out) == raw_tensors(source)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) >= 3
    held = {}
    for file in files:
        with safe_open(out / file, "numpy") as f:
            names = list(f.keys())
            assert sum(f.get_tensor(n).nbytes for n in names) <= 20_000
            held |= dict.fromkeys(names, file)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(len(t[2]) for t in raw_tensors(source).values())
    again, params_again = load_params(out)
    assert again == spec
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, params_again))


@pytest.mark.slow
def test_memory_is_the_largest_stacked_group_and_not_the_model(tmp_path):
    """0.54 GB of parameters as a run saves them, the largest array 0.13 GB: at most that and 200 MB above the start."""
    config = BASE | {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 65_536,
    }
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    snapshot_source(tmp_path / "source", tmp_path / "snapshot")
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32)
    params = jax.tree.map(
        lambda info: jnp.asarray(np.resize(block, info.shape)),
        param_infos(spec_from_hf(config)),
        is_leaf=lambda x: isinstance(x, ParamInfo),
    )
    TrainingStore(tmp_path / "actor", keep=1).save(1, params, {}, {}, hf_source=tmp_path / "snapshot")
    sizes = [a.nbytes for a in jax.tree.leaves(params)]
    assert sum(sizes) > 1.5 * (max(sizes) + 200e6)
    places = {"load_parameters_path": tmp_path / "actor" / "1", "base_output_directory": tmp_path / "out"}
    peak = peak_above_start(to_huggingface, ExportConfig, **places)
    assert peak < max(sizes) + 200e6
    assert sum(a.nbytes for a in load_file(tmp_path / "out" / "model.safetensors").values()) == sum(sizes)


def test_a_snapshot_of_a_snapshot_and_an_export_of_an_export_are_the_same(tmp_path):
    source, _, params = source_and_params(tmp_path)
    snapshot_source(tmp_path / "snapshot", tmp_path / "again")
    for file in (tmp_path / "snapshot").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    out = export(params, tmp_path / "again", tmp_path / "out")
    snapshot_source(out, tmp_path / "third")
    assert raw_tensors(export(load_params(out)[1], tmp_path / "third", tmp_path / "out2")) == raw_tensors(source)


def test_a_model_without_config_is_exported_with_that_of_its_preset(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "toy", BASE)
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    (source / "config.json").unlink()
    snapshot_source(source, tmp_path / "snapshot", "toy")
    out = export(load_params(source, "toy")[1], tmp_path / "snapshot", tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == BASE
    assert raw_tensors(out) == raw_tensors(source)


def test_a_model_that_never_had_weights_is_exported_in_float32(tmp_path):
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    _, params = load_params(source)
    (source / "model.safetensors").unlink()
    snapshot_source(source, tmp_path / "snapshot")
    out = export(params, tmp_path / "snapshot", tmp_path / "out")
    assert {t[0] for t in raw_tensors(out).values()} == {"float32"}


@pytest.mark.torch
@pytest.mark.parametrize("name", ["all_biases_tied", "llama3_rope_new_place", "head_dim_not_width_over_heads"])
def test_transformers_loads_the_export_and_computes_the_same(name, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "MAX_SHARD_BYTES", 20_000)
    pytest.importorskip("torch")
    from llama_variants import probe_tokens
    from make_references import transformers_logits

    config = variant_config(name)
    source, _, params = source_and_params(tmp_path, config)
    out = export(params, tmp_path / "snapshot", tmp_path / "out")
    tokens = probe_tokens(config)
    assert (transformers_logits(out, tokens) == transformers_logits(source, tokens)).all()


# ---- what an export refuses ----


def refused(match, params, path, *args):
    with pytest.raises(BurnishError, match=match) as error:
        export(params, path / "snapshot", path / "out", *args)
    assert sorted(p.name for p in path.iterdir()) == ["snapshot", "source"]
    return str(error.value)


def test_parameters_of_another_shape_are_refused_by_name(tmp_path):
    _, _, params = source_and_params(tmp_path)
    params["layers"]["k_proj"] = params["layers"]["q_proj"]
    assert "layers/k_proj" in refused(r"asks for \[2, 32, 2, 8\]", params, tmp_path)
    del params["layers"]["k_proj"]
    refused("disagree about the parameters layers/k_proj", params, tmp_path)


def test_weights_that_are_nan_or_overflow_are_refused_by_name(tmp_path):
    _, _, params = source_and_params(tmp_path)
    params["layers"]["up_proj"][1, 2, 3] = 1e6
    refused("model.layers.1.mlp.up_proj.weight overflows float16", params, tmp_path, "float16")
    params["layers"]["up_proj"][1, 2, 3] = np.nan
    refused("model.layers.1.mlp.up_proj.weight holds NaN", params, tmp_path)


@pytest.mark.parametrize("phase", ["transfer", "check_written", "compare_values", "set_dtype"])
def test_an_export_that_fails_in_any_phase_leaves_nothing(phase, tmp_path, monkeypatch):
    source, _, params = source_and_params(tmp_path)
    real = getattr(targets, phase)

    def fail(*args, **kwargs):
        real(*args, **kwargs)
        raise CheckpointError("disk gone")

    monkeypatch.setattr(targets, phase, fail)
    refused("disk gone", params, tmp_path, "float32")
    monkeypatch.setattr(targets, phase, real)
    assert raw_tensors(export(params, tmp_path / "snapshot", tmp_path / "out")) == raw_tensors(source)
