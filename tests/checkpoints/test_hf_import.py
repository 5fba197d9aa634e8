"""Reading Hugging Face checkpoints: what fits exactly is read, anything else is an error that names it."""

import json
import shutil
import struct
import tracemalloc
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from llama_variants import BASE, random_tensors, variant_config, write_checkpoint

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_import import load_params, resolve
from burnish.models.errors import ModelError
from burnish.models.rope import inverse_frequencies

INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
Q0 = "model.layers.0.self_attn.q_proj.weight"


def checkpoint(path, shards=1, extra=(), drop=(), config=None, dtype=np.float32):
    config = BASE if config is None else config
    tensors = {k: v for k, v in random_tensors(config, dtype).items() if k not in drop}
    return write_checkpoint(path, config, tensors | dict(extra), shards)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_each_dtype_is_read_to_the_values_in_the_file(dtype, tmp_path):
    tensors = random_tensors(BASE, dtype)
    spec, params = load_params(write_checkpoint(tmp_path, BASE, tensors))
    assert {a.dtype for a in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    q = tensors[Q0].astype(np.float32)  # (H*N, D); row h*N + n is head h, channel n
    H, N, D = spec.num_heads, spec.head_dim, spec.d_model
    want = np.array([[[q[h * N + n, d] for n in range(N)] for h in range(H)] for d in range(D)])
    assert (params["layers"]["q_proj"][0] == want).all()
    o = tensors["model.layers.1.self_attn.o_proj.weight"].astype(np.float32)  # (D, H*N)
    assert (params["layers"]["o_proj"][1].reshape(H * N, D) == o.T).all()


def test_shards_hold_the_same_model_as_one_file(tmp_path):
    _, one = load_params(checkpoint(tmp_path / "one"))
    _, four = load_params(checkpoint(tmp_path / "four", shards=4))
    assert same(one, four)


def test_bfloat16_parameters_are_the_file_rounded(tmp_path):
    _, wide = load_params(checkpoint(tmp_path))
    _, narrow = load_params(tmp_path, dtype=ml_dtypes.bfloat16)
    assert same(jax.tree.map(lambda a: a.astype(ml_dtypes.bfloat16), wide), narrow)


def test_memory_is_the_parameters_and_one_tensor(tmp_path):
    config = BASE | {"num_hidden_layers": 24, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
    checkpoint(tmp_path, config=config)
    tracemalloc.start()
    try:
        _, params = load_params(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    total = sum(a.nbytes for a in jax.tree.leaves(params))
    assert total > 10e6
    assert peak < total + 1.5e6


def test_progress_counts_every_byte(tmp_path):
    calls = []
    load_params(checkpoint(tmp_path, shards=2), on_progress=lambda *a: calls.append(a))
    assert {name for name, _, _ in calls} == set(random_tensors(BASE))
    assert calls[-1][1] == calls[-1][2] == sum(t.nbytes for t in random_tensors(BASE).values())


# ---- what does not fit ----


def damaged(path, match, *names, **kwargs):
    with pytest.raises(CheckpointError, match=match) as error:
        load_params(path, **kwargs)
    for name in names:
        assert name in str(error.value)


def test_a_missing_tensor_is_named(tmp_path):
    damaged(checkpoint(tmp_path, drop=[Q0]), "missing", Q0)


def test_an_untied_model_without_head_is_an_error(tmp_path):
    damaged(checkpoint(tmp_path, drop=["lm_head.weight"]), "missing", "lm_head.weight")


def test_an_extra_tensor_is_named(tmp_path):
    extra = {"model.layers.2.mlp.up_proj.weight": np.zeros((48, 32), np.float32)}
    damaged(checkpoint(tmp_path, extra=extra), "no place", "model.layers.2.mlp.up_proj.weight")


def test_biases_without_attention_bias_are_an_error(tmp_path):
    damaged(
        checkpoint(tmp_path, extra={"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}),
        "no place",
        "q_proj.bias",
    )


def test_a_misshaped_tensor_is_named_with_both_shapes(tmp_path):
    path = checkpoint(tmp_path, extra={Q0: np.zeros((16, 32), np.float32)})
    damaged(path, r"\(16, 32\).*\(32, 32\)", Q0, "model.safetensors")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype, tmp_path):
    path = checkpoint(tmp_path, extra={Q0: np.zeros((32, 32), dtype)})
    damaged(path, "F32, F16, BF16 are read", Q0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad, tmp_path):
    tensor = random_tensors(BASE)[Q0]
    tensor[3, 4] = bad
    damaged(checkpoint(tmp_path, extra={Q0: tensor}), "NaN or infinity", Q0, "model.safetensors")


def test_a_truncated_file_names_the_tensors_it_lost(tmp_path):
    file = checkpoint(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    damaged(tmp_path, "truncated", "model.safetensors")
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    last = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"][1])
    damaged(tmp_path, "incomplete tensors", last)


@pytest.mark.parametrize("keep", [0, 5, 8, 40])
def test_a_file_cut_in_its_header_is_an_error(keep, tmp_path):
    file = checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    damaged(tmp_path, "header", "model.safetensors")


def test_bytes_after_the_last_tensor_are_an_error(tmp_path):
    file = checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    damaged(tmp_path, "model.safetensors")


def test_a_header_whose_offsets_lie_is_an_error(tmp_path):
    file = checkpoint(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header[Q0]["data_offsets"][0] += 4
    text = json.dumps(header, separators=(",", ":")).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    damaged(tmp_path, "model.safetensors")


def test_a_missing_shard_is_named_with_its_tensors(tmp_path):
    path = checkpoint(tmp_path, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    damaged(path, "shards are missing", "model-00002-of-00003.safetensors", "model.layers")


def edit_index(path, change):
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))
    return path


def test_an_index_that_lists_what_no_shard_holds_is_an_error(tmp_path):
    name, shard = "model.layers.9.mlp.up_proj.weight", "model-00001-of-00003.safetensors"
    path = edit_index(checkpoint(tmp_path, shards=3), lambda m: m.update({name: shard}))
    damaged(path, "not in the shard", name, shard)


def test_an_index_that_names_the_wrong_shard_is_an_error(tmp_path):
    path = edit_index(checkpoint(tmp_path, shards=3), lambda m: m.update({Q0: "model-00003-of-00003.safetensors"}))
    damaged(path, "not in the shard", Q0)


def test_an_index_that_leaves_a_tensor_out_is_an_error(tmp_path):
    damaged(edit_index(checkpoint(tmp_path, shards=3), lambda m: m.pop(Q0)), "does not list", Q0)


def test_an_index_that_points_out_of_its_directory_is_an_error(tmp_path):
    path = edit_index(checkpoint(tmp_path, shards=3), lambda m: m.update({Q0: "../model.safetensors"}))
    damaged(path, "not a file name")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}'])
def test_an_unreadable_index_is_an_error(text, tmp_path):
    (checkpoint(tmp_path, shards=2) / "model.safetensors.index.json").write_text(text)
    damaged(tmp_path, "weight_map")


@pytest.mark.parametrize("value", [5, None, ["model.safetensors"], {"file": "a"}])
def test_an_index_whose_values_are_no_names_is_an_error(value, tmp_path):
    damaged(edit_index(checkpoint(tmp_path, shards=2), lambda m: m.update({Q0: value})), "not a file name", Q0)


def test_single_file_and_index_together_are_ambiguous(tmp_path):
    path = checkpoint(tmp_path, shards=2)
    shutil.copy(path / "model-00001-of-00002.safetensors", path / "model.safetensors")
    damaged(path, "both")


def test_a_directory_without_safetensors_says_what_it_has(tmp_path):
    path = checkpoint(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    damaged(path, "safetensors only", "pytorch_model.bin")


def test_a_config_that_is_no_json_is_an_error(tmp_path):
    (checkpoint(tmp_path) / "config.json").write_text("{")
    damaged(tmp_path, "config.json")


# ---- tensors that are no parameters ----


def test_rotary_buffers_that_agree_are_accepted_and_others_refused(tmp_path):
    spec, params = load_params(checkpoint(tmp_path / "plain"))
    freq = inverse_frequencies(spec.rope, spec.head_dim)
    _, with_buffer = load_params(checkpoint(tmp_path / "same", extra={INV_FREQ: freq.astype(np.float16)}))
    assert same(params, with_buffer)
    damaged(checkpoint(tmp_path / "other", extra={INV_FREQ: freq * 1.1}), "rope", INV_FREQ)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_tied_head_that_equals_the_embeddings_is_accepted_and_another_refused(shards, tmp_path):
    config = variant_config("tied_head")
    embed = random_tensors(config)["model.embed_tokens.weight"]
    _, params = load_params(checkpoint(tmp_path / "plain", config=config))
    head = {"lm_head.weight": embed}
    _, with_head = load_params(checkpoint(tmp_path / "same", shards, head, config=config))
    assert same(params, with_head)
    head = {"lm_head.weight": embed + np.float32(1e-3)}
    damaged(checkpoint(tmp_path / "other", shards, head, config=config), "tie_word_embeddings", "lm_head")


# ---- which model, and where ----


def test_model_name_must_agree_with_config(tmp_path):
    with pytest.raises(ModelError, match="hidden_size is 32 there and 576"):
        load_params(checkpoint(tmp_path), model_name="smollm2-135m")


def test_weights_that_are_not_the_preset_are_an_error(tmp_path):
    (checkpoint(tmp_path) / "config.json").unlink()
    damaged(tmp_path, "missing", model_name="smollm2-135m")
    with pytest.raises(ModelError, match="model_name="):
        load_params(tmp_path)


def test_resolve_takes_a_directory_as_it_is(tmp_path):
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["/no/such/dir", "./no_such_dir", "a/b/c"])
def test_a_path_that_is_no_directory_is_not_taken_for_a_hub_id(path):
    with pytest.raises(CheckpointError, match="no directory"):
        resolve(path)


def test_a_place_in_an_object_store_is_not_taken_for_a_hub_id():
    with pytest.raises(CheckpointError, match=r"gs://bucket/x holds no MaxText and no training checkpoint"):
        resolve("gs://bucket/x")


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(str(tmp_path / "model.safetensors"))


def hub_answers(monkeypatch, error):
    import huggingface_hub

    def snapshot_download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def hub_error(kind, status):
    request = SimpleNamespace(method="GET", url="https://hub.test/?token=hf_secret")
    response = SimpleNamespace(status_code=status, headers={}, request=request)
    return kind("hf_secret refused", response=response)


def test_an_id_that_is_not_cached_explains_itself_offline():
    with pytest.raises(CheckpointError, match="not in the local cache and the hub cannot be reached"):
        resolve("burnish-tests/no-such-model")


def test_hub_failures_are_explained_without_the_token(monkeypatch):
    from huggingface_hub import errors

    cases = [
        (hub_error(errors.GatedRepoError, 403), "accept its licence"),
        (hub_error(errors.RepositoryNotFoundError, 404), "does not exist or is private"),
        (hub_error(errors.HfHubHTTPError, 500), "500"),
        (errors.LocalEntryNotFoundError("hf_secret"), "check the network"),
        (errors.OfflineModeIsEnabled("hf_secret"), "check the network"),
        (OSError("hf_secret"), "OSError"),
    ]
    for error, match in cases:
        hub_answers(monkeypatch, error)
        with pytest.raises(CheckpointError, match=match) as raised:
            resolve("owner/model", token="hf_secret")
        assert "hf_secret" not in str(raised.value)
        assert "owner/model" in str(raised.value)


def test_only_weights_configs_and_tokenizer_are_asked_from_the_hub(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    repository = [
        *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "LICENSE"),
        *("pytorch_model.bin", "README.md", "original/params.json", "onnx/model.onnx", "modeling_x.py"),
        *("consolidated.safetensors", "original/consolidated.00.pth", "onnx/config.json"),
    ]
    asked = {}

    def snapshot_download(repo_id, *, token, allow_patterns, ignore_patterns):
        asked.update(repo_id=repo_id, token=token)
        asked["files"] = list(
            filter_repo_objects(repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("owner/model", token="hf_secret") == tmp_path
    assert asked == {"repo_id": "owner/model", "token": "hf_secret", "files": repository[:9]}
