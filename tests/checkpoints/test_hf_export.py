"""Writing Hugging Face checkpoints: the source's files, the trained weights, and nothing half done."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from llama_variants import BASE, VARIANTS, random_tensors, variant_config, write_checkpoint
from safetensors import safe_open

from burnish.checkpoints import hf_export, staging
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_export import snapshot_source
from burnish.checkpoints.hf_import import load_params
from burnish.models.families import PRESETS

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE",
)


def export(spec, params, snapshot, out, *args, **kwargs):
    hf_export.export(spec, params, snapshot, out, *args, **kwargs)
    return out


def raw_tensors(directory):
    """{name: (dtype, shape, bytes)} by the safetensors library, without burnish."""
    tensors = {}
    for file in Path(directory).glob("*.safetensors"):
        with safe_open(file, "numpy") as f:
            assert f.metadata() == {"format": "pt"}
            for name in f.keys():  # noqa: SIM118 (not a dict)
                array = f.get_tensor(name)
                tensors[name] = (array.dtype.name, array.shape, array.tobytes())
    return tensors


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
    source, spec, params = source_and_params(tmp_path, config, tensors)
    out = export(spec, params, tmp_path / "snapshot", tmp_path / "out")
    assert raw_tensors(out) == raw_tensors(source)
    for file in SIDE_FILES:
        assert (out / file).read_bytes() == (source / file).read_bytes()
    assert sorted(p.name for p in out.iterdir()) == sorted([*SIDE_FILES, "model.safetensors"])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tied_head_is_written_where_the_source_had_it_and_only_there(shards, tmp_path):
    config = variant_config("tied_head")
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    source, spec, params = source_and_params(tmp_path, config, tensors, shards)
    params["embed"] += 1  # as if trained
    written = raw_tensors(export(spec, params, tmp_path / "snapshot", tmp_path / "out"))
    assert written.keys() == raw_tensors(source).keys()
    assert written["lm_head.weight"] == written["model.embed_tokens.weight"]
    assert written["lm_head.weight"][2] == params["embed"].tobytes()


def test_rotary_buffers_of_the_source_are_left_out(tmp_path):
    freq = (1e4 ** (-np.arange(0, 8, 2) / 8)).astype(np.float32)
    tensors = random_tensors(BASE)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": freq}
    _, spec, params = source_and_params(tmp_path, BASE, tensors | extra)
    assert raw_tensors(export(spec, params, tmp_path / "snapshot", tmp_path / "out")).keys() == tensors.keys()


@pytest.mark.parametrize("field", ["torch_dtype", "dtype", None])
@pytest.mark.parametrize("weight_dtype", ["float32", "float16", "bfloat16"])
def test_weight_dtype_changes_every_tensor_and_the_config_says_so(weight_dtype, field, tmp_path):
    config = {k: v for k, v in BASE.items() if k != "torch_dtype"} | ({field: "float64"} if field else {})
    source, spec, params = source_and_params(tmp_path, config, mixed(config))
    out = export(spec, params, tmp_path / "snapshot", tmp_path / "out", weight_dtype)
    want = np.dtype(getattr(ml_dtypes, weight_dtype, weight_dtype))
    for name, (dtype, _, data) in raw_tensors(out).items():
        values = np.frombuffer(raw_tensors(source)[name][2], raw_tensors(source)[name][0])
        assert (dtype, data) == (weight_dtype, values.astype(want).tobytes())
    assert json.loads((out / "config.json").read_text()) == config | {field or "torch_dtype": weight_dtype}
    for file in SIDE_FILES[1:]:
        assert (out / file).read_bytes() == (source / file).read_bytes()


def test_a_dtype_that_the_source_has_already_leaves_config_json_as_it_is(tmp_path):
    source, spec, params = source_and_params(tmp_path)
    out = export(spec, params, tmp_path / "snapshot", tmp_path / "out", "float32")
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_parameters_on_a_device_and_in_bfloat16_keep_the_source_dtype(tmp_path):
    source, spec, params = source_and_params(tmp_path)
    on_device = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), params)
    written = raw_tensors(export(spec, on_device, tmp_path / "snapshot", tmp_path / "out"))
    for name, (dtype, shape, data) in raw_tensors(source).items():
        rounded = np.frombuffer(data, dtype).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert written[name] == ("float32", shape, rounded.tobytes())


@pytest.mark.parametrize("source_shards", [1, 3])
def test_shards_are_at_most_the_limit_and_the_index_lists_each_tensor_once(source_shards, tmp_path):
    source, spec, params = source_and_params(tmp_path, shards=source_shards)
    out = export(spec, params, tmp_path / "snapshot", tmp_path / "out", max_shard_bytes=20_000)
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


def test_memory_is_a_few_tensors_not_the_model(tmp_path):
    config = BASE | {"num_hidden_layers": 24, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
    _, spec, params = source_and_params(tmp_path, config)
    assert sum(a.nbytes for a in jax.tree.leaves(params)) > 10e6
    tracemalloc.start()
    try:
        export(spec, params, tmp_path / "snapshot", tmp_path / "out", "bfloat16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4e6


def test_a_snapshot_of_a_snapshot_and_an_export_of_an_export_are_the_same(tmp_path):
    source, spec, params = source_and_params(tmp_path)
    snapshot_source(tmp_path / "snapshot", tmp_path / "again")
    for file in (tmp_path / "snapshot").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    out = export(spec, params, tmp_path / "again", tmp_path / "out")
    snapshot_source(out, tmp_path / "third")
    assert raw_tensors(export(*load_params(out), tmp_path / "third", tmp_path / "out2")) == raw_tensors(source)


def test_a_model_without_config_is_exported_with_that_of_its_preset(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "toy", BASE)
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    (source / "config.json").unlink()
    snapshot_source(source, tmp_path / "snapshot", "toy")
    out = export(*load_params(source, "toy"), tmp_path / "snapshot", tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == BASE
    assert raw_tensors(out) == raw_tensors(source)


def test_a_model_that_never_had_weights_is_exported_in_float32(tmp_path):
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    spec, params = load_params(source)
    (source / "model.safetensors").unlink()
    snapshot_source(source, tmp_path / "snapshot")
    out = export(spec, params, tmp_path / "snapshot", tmp_path / "out")
    assert {t[0] for t in raw_tensors(out).values()} == {"float32"}


@pytest.mark.torch
@pytest.mark.parametrize("name", ["all_biases_tied", "llama3_rope_new_place", "head_dim_not_width_over_heads"])
def test_transformers_loads_the_export_and_computes_the_same(name, tmp_path):
    pytest.importorskip("torch")
    from llama_variants import probe_tokens
    from make_references import transformers_logits

    config = variant_config(name)
    source, spec, params = source_and_params(tmp_path, config)
    out = export(spec, params, tmp_path / "snapshot", tmp_path / "out", max_shard_bytes=20_000)
    tokens = probe_tokens(config)
    assert (transformers_logits(out, tokens) == transformers_logits(source, tokens)).all()


# ---- what an export refuses ----


def refused(match, *args, **kwargs):
    with pytest.raises(CheckpointError, match=match) as error:
        export(*args, **kwargs)
    return str(error.value)


def nothing_left(path):
    return sorted(p.name for p in path.iterdir()) == ["snapshot", "source"]


def test_an_output_directory_that_is_not_empty_is_refused(tmp_path):
    _, spec, params = source_and_params(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused("not empty", spec, params, tmp_path / "snapshot", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_an_empty_output_directory_is_used(tmp_path):
    source, spec, params = source_and_params(tmp_path)
    (tmp_path / "out").mkdir()
    assert raw_tensors(export(spec, params, tmp_path / "snapshot", tmp_path / "out")) == raw_tensors(source)


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    _, spec, params = source_and_params(tmp_path)
    free = hf_export.shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(hf_export.shutil, "disk_usage", lambda path: free)
    refused("free", spec, params, tmp_path / "snapshot", tmp_path / "out")
    assert nothing_left(tmp_path)


def test_parameters_of_another_shape_are_refused_by_name(tmp_path):
    _, spec, params = source_and_params(tmp_path)
    params["layers"]["k_proj"] = params["layers"]["q_proj"]
    assert "layers.k_proj" in refused("shape", spec, params, tmp_path / "snapshot", tmp_path / "out")
    del params["layers"]["k_proj"]
    refused("layers", spec, params, tmp_path / "snapshot", tmp_path / "out")
    assert nothing_left(tmp_path)


def test_weights_that_are_nan_or_overflow_are_refused_by_name(tmp_path):
    _, spec, params = source_and_params(tmp_path)
    params["layers"]["up_proj"][1, 2, 3] = 1e6
    message = refused("overflows F16", spec, params, tmp_path / "snapshot", tmp_path / "out", "float16")
    assert "model.layers.1.mlp.up_proj.weight" in message
    params["layers"]["up_proj"][1, 2, 3] = np.nan
    refused("NaN", spec, params, tmp_path / "snapshot", tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_snapshot_of_another_model_is_refused(tmp_path):
    _, spec, params = source_and_params(tmp_path)
    config = json.loads((tmp_path / "snapshot" / "config.json").read_text())
    (tmp_path / "snapshot" / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    refused("another model", spec, params, tmp_path / "snapshot", tmp_path / "out")
    refused("snapshot of the source", spec, params, tmp_path / "source", tmp_path / "out")


def test_an_unknown_dtype_is_refused(tmp_path):
    _, spec, params = source_and_params(tmp_path)
    refused("weight_dtype is 'int8'", spec, params, tmp_path / "snapshot", tmp_path / "out", "int8")


# ---- interrupted exports ----


@pytest.mark.parametrize("phase", ["_write_weights", "write_file", "verify", "_sync_tree", "set_dtype"])
def test_an_export_that_fails_in_any_phase_leaves_nothing(phase, tmp_path, monkeypatch):
    source, spec, params = source_and_params(tmp_path)
    module = staging if phase == "_sync_tree" else hf_export
    real = getattr(module, phase)

    def fail(*args, **kwargs):
        real(*args, **kwargs)
        raise OSError("disk gone")

    monkeypatch.setattr(module, phase, fail)
    with pytest.raises(OSError, match="disk gone"):
        export(spec, params, tmp_path / "snapshot", tmp_path / "out", "float32")
    assert nothing_left(tmp_path)
    monkeypatch.setattr(module, phase, real)
    assert raw_tensors(export(spec, params, tmp_path / "snapshot", tmp_path / "out")) == raw_tensors(source)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["halfway through the weights", "just before the rename"])
def test_kill_9_leaves_no_directory_that_looks_complete(phase, tmp_path):
    source, spec, params = source_and_params(tmp_path)
    script = f"""
        import os, time
        from pathlib import Path
        from burnish.checkpoints import hf_export
        from burnish.checkpoints.hf_import import load_params
        root = Path({str(tmp_path)!r})
        calls = 0
        def wait(*args):
            global calls
            calls += 1
            if calls == 5 or {phase!r} == "just before the rename":
                (root / "reached").touch()
                time.sleep(600)
        progress = wait
        if {phase!r} == "just before the rename":
            os.rename, progress = wait, None
        spec, params = load_params(root / "source")
        hf_export.export(spec, params, root / "snapshot", root / "out", on_progress=progress)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "reached").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (tmp_path / "reached").unlink()
    left = [p.name for p in tmp_path.iterdir() if p.name not in ("source", "snapshot")]
    assert len(left) == 1
    assert left[0].startswith(".out.burnish-partial-")
    assert raw_tensors(export(spec, params, tmp_path / "snapshot", tmp_path / "out")) == raw_tensors(source)
    assert not (tmp_path / left[0]).exists()
