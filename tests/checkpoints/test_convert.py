"""Conversions between all kinds of checkpoints: nothing is lost, nothing that is wrong passes, and nothing
that is half done looks whole.
"""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from llama_variants import BASE, random_tensors, write_checkpoint
from memory import peak_above_start
from rich.console import Console
from safetensors.numpy import load_file

from burnish.checkpoints import convert_commands, hf_rows, maxtext, sources, staging, targets, transfer
from burnish.checkpoints.compare_command import CheckpointsDifferError, compare
from burnish.checkpoints.convert_commands import convert, to_maxtext
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.export_command import to_huggingface
from burnish.checkpoints.hf_export import snapshot_source
from burnish.checkpoints.hf_import import load_params
from burnish.checkpoints.inspect_command import inspect
from burnish.checkpoints.maxtext import open_maxtext
from burnish.checkpoints.maxtext_map import family_of, hf_tensors, leaves
from burnish.checkpoints.orbax_files import OrbaxReader
from burnish.checkpoints.store import TrainingStore, load_model_params
from burnish.config.schema import CompareConfig, ConvertConfig, ExportConfig, InspectConfig, ToMaxTextConfig
from burnish.errors import BurnishError
from burnish.models.errors import ModelError
from burnish.models.families import spec_from_hf
from burnish.models.rope import inverse_frequencies

INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"

# Heads of 16: MaxText's factor 1/√16 on q is exact, so that a way there and back changes nothing.
EXACT = BASE | {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE), shards=3)


def run(source, destination, to, **options):
    text = io.StringIO()
    config = ConvertConfig(source=str(source), destination=str(destination), to=to, **options)
    convert(config, Console(file=text, width=200))
    return text.getvalue()


def refused(message, *args, **options):
    with pytest.raises(BurnishError, match=message) as error:
        run(*args, **options)
    return str(error.value)


def printed(command, config):
    text = io.StringIO()
    command(config, Console(file=text, width=200))
    return text.getvalue()


def differences(first, second, **options):
    text = io.StringIO()
    config = CompareConfig(first=str(first), second=str(second), **options)
    with pytest.raises(CheckpointsDifferError):
        compare(config, Console(file=text, width=200))
    return text.getvalue()


def left_beside(directory):
    return [p.name for p in directory.iterdir() if p.name != "source"]


# ---- every way round ----


@pytest.mark.parametrize("first", ["hf", "maxtext", "training"])
@pytest.mark.parametrize("second", ["hf", "maxtext", "training"])
def test_any_kind_becomes_any_other_and_back(first, second, tmp_path):
    config = EXACT | {"tie_word_embeddings": True}
    source = write_checkpoint(tmp_path / "source", config, random_tensors(config))
    run(source, tmp_path / "a", first)
    run(tmp_path / "a", tmp_path / "b", second)
    run(tmp_path / "b", tmp_path / "c", "hf")
    back, want = load_file(tmp_path / "c" / "model.safetensors"), load_file(source / "model.safetensors")
    assert {n: a.tobytes() for n, a in back.items()} == {n: a.tobytes() for n, a in want.items()}
    for file in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"):
        assert (tmp_path / "c" / file).read_bytes() == (source / file).read_bytes()


def test_a_converted_training_checkpoint_is_one_to_start_from(source, tmp_path):
    run(source, tmp_path / "start", "training")
    _, want = load_params(source)
    found = load_model_params(tmp_path / "start" / "model_params")
    assert found.keys() == want.keys()
    for name, array in want["layers"].items():
        assert np.array_equal(found["layers"][name], array)
    config = ExportConfig(load_parameters_path=str(tmp_path / "start"), base_output_directory=str(tmp_path / "hf"))
    to_huggingface(config, Console(quiet=True))
    assert not load_file(tmp_path / "hf" / "model.safetensors").keys() - random_tensors(BASE).keys()


def test_a_run_checkpoint_becomes_maxtext(tmp_path):
    source = write_checkpoint(tmp_path / "source", EXACT, random_tensors(EXACT))
    snapshot_source(source, tmp_path / "snapshot")
    _, params = load_params(source)
    store = TrainingStore(tmp_path / "run" / "checkpoints" / "actor", keep=1)
    store.save(7, params, {}, {}, hf_source=tmp_path / "snapshot")
    step = tmp_path / "run" / "checkpoints" / "actor" / "7"
    for path, out in ((step, "a"), (step / "model_params", "b")):
        run(path, tmp_path / out, "maxtext", scan_layers=False)
    run(source, tmp_path / "direct", "maxtext", scan_layers=False)
    assert "The same" in printed(compare, CompareConfig(first=str(tmp_path / "a"), second=str(tmp_path / "direct")))
    assert "The same" in printed(compare, CompareConfig(first=str(tmp_path / "b"), second=str(step)))


@pytest.mark.parametrize("to", ["hf", "maxtext", "training"])
def test_weight_dtype_is_applied_everywhere(to, source, tmp_path):
    run(source, tmp_path / "out", to, weight_dtype="bfloat16")
    run(tmp_path / "out", tmp_path / "hf", "hf", weight_dtype=None if to == "hf" else "bfloat16")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {t.dtype.name for t in tensors.values()} == {"bfloat16"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, want in random_tensors(BASE).items():
        if "q_proj" not in name:  # scaled by MaxText before it is rounded
            assert np.array_equal(tensors[name], want.astype(ml_dtypes.bfloat16)), name


def test_needs_are_said_first_and_speed_last(source, tmp_path):
    lines = run(source, tmp_path / "out", "maxtext").splitlines()
    assert "Hugging Face checkpoint" in lines[0]
    assert "Needs" in lines[1]
    assert "GB free" in lines[1]
    assert any("GB/s" in line for line in lines[2:])


def test_a_log_has_lines_instead_of_a_bar(source, tmp_path, monkeypatch):
    assert "\n\n" not in run(source, tmp_path / "out", "hf")
    monkeypatch.setattr(convert_commands, "SAID_EVERY", 0.0)
    lines = [line for line in run(source, tmp_path / "again", "hf").splitlines() if line.startswith("Converting: ")]
    assert len(lines) == len(random_tensors(BASE))


# ---- what is wrong with a source ----


def test_a_model_name_that_does_not_describe_the_source_is_refused(source, tmp_path):
    with pytest.raises(ModelError, match="hidden_size is 32 there and 4096"):
        run(source, tmp_path / "out", "maxtext", model_name="llama3.1-8b")
    run(source, tmp_path / "out", "maxtext", model_name="llama3.1-8b", override_model_architecture=True)


def test_config_that_does_not_fit_a_maxtext_checkpoint_is_refused(source, tmp_path):
    run(source, tmp_path / "mt", "maxtext")
    other = write_checkpoint(tmp_path / "other", BASE | {"intermediate_size": 64}, {"x": np.zeros(1, np.float32)})
    message = refused("does not fit config.json", tmp_path / "mt", tmp_path / "out", "hf", hf_model_path=str(other))
    assert "decoder.layers.mlp.wi_0.kernel is (32, 2, 48) and should be (32, 2, 64)" in message
    deeper = write_checkpoint(tmp_path / "deep", BASE | {"num_hidden_layers": 3}, {"x": np.zeros(1, np.float32)})
    refused("does not fit", tmp_path / "mt", tmp_path / "out", "hf", hf_model_path=str(deeper))
    assert not (tmp_path / "out").exists()


def test_a_maxtext_checkpoint_without_a_config_says_what_to_give(source, tmp_path):
    run(source, tmp_path / "mt", "maxtext")
    shutil.rmtree(tmp_path / "mt" / "hf_source")
    assert "hf_model_path" in refused("without its source's files", tmp_path / "mt", tmp_path / "out", "hf")
    run(tmp_path / "mt", tmp_path / "out", "hf", hf_model_path=str(source))


def test_scan_layers_that_contradicts_the_checkpoint_is_refused(source, tmp_path):
    run(source, tmp_path / "mt", "maxtext", scan_layers=False)
    config = ExportConfig(
        load_parameters_path=str(tmp_path / "mt"), base_output_directory=str(tmp_path / "hf"), scan_layers=True
    )
    with pytest.raises(CheckpointError, match=r"scan_layers=true, but the layers of .* are one by one"):
        to_huggingface(config, Console(quiet=True))


def test_several_steps_in_a_directory_must_be_told_apart(source, tmp_path):
    run(source, tmp_path / "mt", "maxtext")
    shutil.copytree(tmp_path / "mt" / "0", tmp_path / "mt" / "10")
    assert "10/items" in refused("holds the steps 0, 10", tmp_path / "mt", tmp_path / "out", "hf")
    run(tmp_path / "mt" / "10", tmp_path / "out", "hf")


def damage_hf(directory, how):
    shards = sorted(directory.glob("model-*.safetensors"))
    if how == "truncated":
        shards[1].write_bytes(shards[1].read_bytes()[:-100])
    elif how == "missing":
        shards[0].unlink()
    elif how == "index":
        file = directory / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        index["weight_map"]["model.norm.weight"] = shards[0].name
        file.write_text(json.dumps(index))
    elif how == "overlap":
        raw = shards[0].read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        first, second = sorted((v for k, v in header.items() if k != "__metadata__"), key=lambda v: v["data_offsets"])[
            :2
        ]
        second["data_offsets"] = first["data_offsets"]
        changed = json.dumps(header).encode()
        shards[0].write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])
    elif how == "bytes left over":
        shards[2].write_bytes(shards[2].read_bytes() + b"more")
    elif how == "directory":
        shards[1].unlink()
        shards[1].mkdir()
    elif how == "pickle":
        for file in directory.glob("model*"):
            file.unlink()
        (directory / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "is truncated"),
        ("missing", "shards are missing"),
        ("index", "lists tensors that are not in the shard"),
        ("overlap", r"model-00001-of-00003.safetensors: .*offset"),
        ("bytes left over", "not fully covered"),
        ("directory", "model-00002-of-00003.safetensors cannot be read: Is a directory"),
        ("pickle", "read from safetensors only"),
    ],
)
def test_a_damaged_hugging_face_source_is_refused(how, message, source, tmp_path):
    damage_hf(source, how)
    refused(message, source, tmp_path / "out", "maxtext")
    assert left_beside(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "missing that config.json asks for: model.norm.weight"),
        ({"model.norm.weight": np.zeros(31, np.float32)}, r"has shape \(31,\)"),
        ({"model.norm.weight": np.zeros(32, np.int8)}, "is I8"),
        ({"model.extra.weight": np.zeros(32, np.float32)}, "no place for: model.extra.weight"),
        ({"model.norm.weight": np.full(32, np.nan, np.float32)}, "model.safetensors: model.norm.weight holds NaN"),
        ({"model.norm.weight": np.full(32, np.inf, np.float32)}, "model.norm.weight holds NaN or infinity"),
        ({INV_FREQ: np.full(4, 0.5, np.float32)}, "model.safetensors: .*inv_freq differs from the rope settings"),
        ({INV_FREQ: np.full(4, 1, np.int8)}, "model.safetensors: .*inv_freq differs from the rope settings"),
    ],
)
def test_a_wrong_tensor_is_named(change, message, tmp_path):
    tensors = {n: a for n, a in (random_tensors(BASE) | change).items() if a is not None}
    source = write_checkpoint(tmp_path / "source", BASE, tensors)
    refused(message, source, tmp_path / "out", "maxtext")
    assert left_beside(tmp_path) == []


def test_rotary_buffers_that_agree_are_left_out(tmp_path):
    spec = spec_from_hf(BASE)
    buffer = {INV_FREQ: inverse_frequencies(spec.rope, spec.head_dim)}
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE) | buffer)
    run(source, tmp_path / "out", "hf")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == random_tensors(BASE).keys()


@pytest.mark.parametrize("kind", ["maxtext", "training"])
def test_nan_is_named_with_the_checkpoint_that_holds_it(kind, source, tmp_path, monkeypatch):
    run(source, tmp_path / "bad", kind)
    monkeypatch.setattr(transfer, "is_finite", lambda array: False)
    message = refused("holds NaN", tmp_path / "bad", tmp_path / "out", "hf")
    assert message.startswith(f"{tmp_path / 'bad'}")


def test_a_value_that_overflows_is_named(tmp_path):
    tensors = random_tensors(BASE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6
    source = write_checkpoint(tmp_path / "source", BASE, tensors)
    for to in ("maxtext", "hf"):
        refused("layers.1.mlp.up_proj.weight overflows float16", source, tmp_path / "out", to, weight_dtype="float16")
    assert left_beside(tmp_path) == []


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("how", ["truncated", "missing", "metadata", "no arrays"])
def test_a_damaged_maxtext_source_is_refused(how, ocdbt, source, tmp_path):
    run(source, tmp_path / "mt", "maxtext", checkpoint_storage_use_ocdbt=ocdbt, checkpoint_storage_use_zarr3=ocdbt)
    items = tmp_path / "mt" / "0" / "items"
    folder = items / "d" if ocdbt else items / "params.params.decoder.layers.mlp.wo.kernel"
    data = max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    if how == "truncated":
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    elif how == "missing":
        data.unlink()
    elif how == "metadata":
        (items / "_METADATA").write_text((items / "_METADATA").read_text()[:-50])
    else:
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError):
        run(items, tmp_path / "out", "hf", hf_model_path=str(source))
    assert sorted(left_beside(tmp_path)) == ["mt"]


def test_a_stored_parameter_that_changed_is_noticed(source, tmp_path):
    run(source, tmp_path / "start", "training")
    reader = OrbaxReader(tmp_path / "start" / "model_params")
    assert reader.array("layers.q_proj").chunks == (1, 32, 4, 8)
    state = tmp_path / "start" / "train_state.json"
    text = state.read_text()
    state.write_text(text.replace('"crc32": ', '"crc32": 1', 1))
    with pytest.raises(BurnishError, match="damaged"):
        run(tmp_path / "start", tmp_path / "out", "hf")
    assert sorted(left_beside(tmp_path)) == ["start"]


# ---- destinations ----


@pytest.mark.parametrize("to", ["hf", "maxtext", "training"])
def test_a_destination_that_is_not_empty_is_refused(to, source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused("not empty", source, tmp_path / "out", to)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("to", ["hf", "maxtext", "training"])
def test_a_full_disk_is_refused_before_anything_is_written(to, source, tmp_path, monkeypatch):
    free = staging.shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: free)
    refused("GB free", source, tmp_path / "out", to)
    assert left_beside(tmp_path) == []


def test_too_little_memory_is_refused_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "_available_memory", lambda: 1_000_000)
    refused("GB of memory", source, tmp_path / "out", "maxtext")
    assert left_beside(tmp_path) == []


@pytest.mark.parametrize("to", ["hf", "maxtext", "training"])
@pytest.mark.parametrize("phase", ["transfer", "sync"])
def test_a_disk_that_fills_on_the_way_leaves_nothing(to, phase, source, tmp_path, monkeypatch):
    module, name = (targets, "transfer") if phase == "transfer" else (staging, "_sync_tree")
    real = getattr(module, name)

    def fail(*args, **kwargs):
        real(*args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, name, fail)
    assert "Free some space" in refused("No space left", source, tmp_path / "out", to)
    assert left_beside(tmp_path) == []
    monkeypatch.setattr(module, name, real)
    run(source, tmp_path / "out", to)


def test_a_shard_that_cannot_be_reserved_is_refused(source, tmp_path, monkeypatch):
    def full(fd, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_rows.os, "posix_fallocate", full)
    refused("cannot be reserved", source, tmp_path / "out", "hf")
    assert left_beside(tmp_path) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda s: s.name)
def test_a_process_that_is_told_to_end_leaves_nothing(signum, source, tmp_path):
    script = f"""
        import signal, time
        from burnish.checkpoints import transfer
        from burnish.cli.main import main
        # Whoever runs the tests in the background may have had them ignored.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        whole = transfer.is_finite
        def wait(rows):
            print("converting", flush=True)
            time.sleep(0.5)
            return whole(rows)
        transfer.is_finite = wait
        main(["to-maxtext", "--hf_model_path={source}", "base_output_directory={tmp_path / "out"}"])
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while "converting" not in process.stdout.readline():
            assert process.poll() is None
        assert any("partial" in name for name in left_beside(tmp_path))
        process.send_signal(signum)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signum
    assert left_beside(tmp_path) == ["scratch"]
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "maxtext"])
@pytest.mark.parametrize("phase", ["halfway", "just before the rename"])
def test_kill_9_leaves_no_directory_that_looks_complete(to, phase, source, tmp_path):
    script = f"""
        import os, time
        from pathlib import Path
        from rich.console import Console
        from burnish.checkpoints import transfer
        from burnish.checkpoints.convert_commands import convert
        from burnish.config.schema import ConvertConfig
        root = Path({str(tmp_path)!r})
        calls = 0
        def wait(*args):
            global calls
            calls += 1
            if calls == 5 or {phase!r} == "just before the rename":
                (root / "reached").touch()
                time.sleep(600)
            return True
        if {phase!r} == "just before the rename":
            os.rename = wait
        else:
            transfer.is_finite = wait
        config = ConvertConfig(source=str(root / "source"), destination=str(root / "out"), to={to!r})
        convert(config, Console(quiet=True))
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
    (left,) = left_beside(tmp_path)
    assert left.startswith(".out.burnish-partial-")
    run(source, tmp_path / "out", to)
    assert left_beside(tmp_path) == ["out"]


def test_an_interrupted_maxtext_checkpoint_is_not_recognised(source, tmp_path):
    """The metadata that makes it one is written last."""
    run(source, tmp_path / "mt", "maxtext")
    (tmp_path / "mt" / "0" / "items" / "_METADATA").unlink()
    assert maxtext.find_items(tmp_path / "mt") is None


# ---- memory ----


def peak(source, destination, to):
    return peak_above_start(convert, ConvertConfig, source=source, destination=destination, to=to)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    """1.1 GB of weights whose largest stacked group is 0.27 GB, and above start no more than that and 200 MB:
    where chunks hold one tensor each, as burnish writes them, not even the group."""
    config = BASE | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 4096,
        "torch_dtype": "bfloat16",
    }
    rng = np.random.default_rng(0)
    block = rng.normal(0, 0.02, (4096, 4096)).astype(ml_dtypes.bfloat16)
    shapes = hf_tensors(leaves(family_of(config), scanned=True))
    tensors = {n: np.ascontiguousarray(np.resize(block.reshape(-1), s)) for n, s in shapes.items()}
    write_checkpoint(tmp_path / "source", config, tensors, shards=8)
    total = sum(t.nbytes for t in tensors.values())
    del tensors
    group = 16 * 1024 * 4096 * 2
    assert total > 4 * group > 500e6
    assert peak(tmp_path / "source", tmp_path / "mt", "maxtext") < group + 200e6
    assert peak(tmp_path / "mt", tmp_path / "hf", "hf") < group + 200e6
    assert peak(tmp_path / "source", tmp_path / "tr", "training") < group + 200e6


# ---- inspect and compare ----


def test_inspect_shows_kind_tree_sizes_config_and_origin(source, tmp_path):
    hf = printed(inspect, InspectConfig(path=str(source)))
    assert "Hugging Face checkpoint" in hf
    assert "F32[64, 32]" in hf
    assert "model-00001-of-00003.safetensors" in hf
    assert "hidden_size: 32" in hf
    run(source, tmp_path / "mt", "maxtext")
    mt = printed(inspect, InspectConfig(path=str(tmp_path / "mt")))
    assert "MaxText checkpoint" in mt
    assert "stacked (scanned)" in mt
    assert "params.params.decoder.layers.mlp.wi_0.kernel" in mt
    assert "float32[32, 2, 48]" in mt
    assert "hf_source" in mt
    run(source, tmp_path / "start", "training")
    training = printed(inspect, InspectConfig(path=str(tmp_path / "start")))
    assert "training checkpoint" in training
    assert "layers.q_proj" in training
    total = sum(a.nbytes for a in random_tensors(BASE).values())
    assert f"{total / 1e3:.2f} kB" in hf.splitlines()[-1]
    assert f"{total / 1e3:.2f} kB" in training.splitlines()[-1]


def test_inspect_says_what_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="no directory on this machine"):
        inspect(InspectConfig(path=str(tmp_path / "nothing")), Console(quiet=True))


def test_compare_names_what_differs_and_by_how_much(source, tmp_path):
    assert "The same: 21 tensors" in printed(compare, CompareConfig(first=str(source), second=str(source)))
    tensors = random_tensors(BASE)
    tensors["model.layers.1.mlp.up_proj.weight"][0, :4] += 0.5
    other = write_checkpoint(tmp_path / "other", BASE | {"rope_theta": 5.0}, tensors)
    text = differences(source, other)
    assert "config.json: rope_theta" in text
    assert "model.layers.1.mlp.up_proj.weight: 4 of 1,536 values (0.26%), by up to 0.5" in text
    assert "down_proj" not in text
    run(other, tmp_path / "mt", "maxtext")
    assert "up_proj.weight: 4 of 1,536 values" in differences(source, tmp_path / "mt")
    assert "up_proj.weight: 4 of 1,536 values" in differences(tmp_path / "mt", source)


def test_compare_says_once_that_all_types_differ(source, tmp_path):
    run(source, tmp_path / "half", "hf", weight_dtype="bfloat16")
    lines = differences(source, tmp_path / "half").splitlines()
    assert [line for line in lines if "F32 and BF16" in line] == [
        "  F32 and BF16: " + ", ".join(sorted(random_tensors(BASE))[:5]) + " and 16 more"
    ]


def test_compare_names_tensors_that_only_one_has(source, tmp_path):
    tied = BASE | {"tie_word_embeddings": True}
    other = write_checkpoint(tmp_path / "other", tied, random_tensors(tied))
    text = differences(source, other)
    assert "only the first has lm_head.weight" in text
    assert "tie_word_embeddings" in text


def test_a_repository_is_found_by_model_name_or_refused(tmp_path):
    config = ToMaxTextConfig(model_name="nothing-7b", base_output_directory=str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="no repository is known"):
        to_maxtext(config, Console(quiet=True))


def test_what_was_written_is_recognised(source, tmp_path):
    run(source, tmp_path / "mt", "maxtext")
    for path in (tmp_path / "mt", tmp_path / "mt" / "0", tmp_path / "mt" / "0" / "items"):
        assert sources.kind_of(str(path)) == "maxtext"
        assert Path(open_maxtext(path).directory) == tmp_path / "mt" / "0" / "items"
    assert sources.kind_of(str(source)) == "hf"
    assert sources.kind_of("owner/name") == "hf"
