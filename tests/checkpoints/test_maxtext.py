"""MaxText's layout, held against checkpoints that its own tools wrote and against plain NumPy."""

import io
import json
import math
import re

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fixtures import FIXTURES, GEMMA, LLAMA, STOCK, fixture
from llama_variants import BASE, random_tensors, write_checkpoint
from rich.console import Console
from safetensors.numpy import load_file

from burnish.checkpoints.convert_commands import convert, to_maxtext
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.export_command import to_huggingface
from burnish.checkpoints.maxtext import open_maxtext
from burnish.checkpoints.maxtext_map import family_of, hf_tensors, leaves
from burnish.config.schema import ConvertConfig, ExportConfig, ToMaxTextConfig

LLAMA3_ROPE = {
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def run(source, destination, to, **options):
    text = io.StringIO()
    config = ConvertConfig(source=str(source), destination=str(destination), to=to, **options)
    out = convert(config, Console(file=text, width=200))
    return out, text.getvalue()


def raw(tensors):
    return {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in tensors.items()}


def text_tensors(directory):
    """Without the vision tower, which is left out, and by the names of a model of text alone."""
    tensors = load_file(directory / "model.safetensors")
    return {n.replace("model.language_model.", "model."): a for n, a in tensors.items() if "vision" not in n}


def arrays(checkpoint):
    return {name: checkpoint.reader.read(checkpoint.stored[name]) for name in checkpoint.stored}


# ---- what MaxText wrote ----


@pytest.mark.parametrize(("name", "source", "scanned", "ocdbt", "zarr3"), STOCK)
def test_a_stock_checkpoint_reads_to_the_tensors_it_came_from(name, source, scanned, ocdbt, zarr3, tmp_path):
    stock = fixture(name, tmp_path)
    opened = open_maxtext(stock)
    assert (opened.scanned, opened.reader.use_ocdbt, opened.reader.use_zarr3) == (scanned, ocdbt, zarr3)
    out, _ = run(stock, tmp_path / "hf", "hf", hf_model_path=str(fixture(source, tmp_path)))
    assert raw(load_file(out / "model.safetensors")) == raw(text_tensors(FIXTURES / source))
    files = ["generation_config.json", "tokenizer.json", "chat_template.jinja"] + ["config.json"] * (source == LLAMA)
    for file in files:
        assert (out / file).read_bytes() == (FIXTURES / source / file).read_bytes()


@pytest.mark.parametrize(("name", "source", "scanned", "ocdbt", "zarr3"), STOCK)
def test_what_is_written_is_what_maxtext_writes(name, source, scanned, ocdbt, zarr3, tmp_path):
    stock = fixture(name, tmp_path)
    items, _ = run(
        fixture(source, tmp_path),
        tmp_path / "mt",
        "maxtext",
        scan_layers=scanned,
        checkpoint_storage_use_ocdbt=ocdbt,
        checkpoint_storage_use_zarr3=zarr3,
    )
    ours, theirs = open_maxtext(items), open_maxtext(stock)
    assert ours.stored == theirs.stored
    assert raw(arrays(ours)) == raw(arrays(theirs))
    assert ours.reader.read("step").dtype == theirs.reader.read("step").dtype
    assert (ours.reader.use_ocdbt, ours.reader.use_zarr3) == (ocdbt, zarr3)
    metadata = json.loads((tmp_path / "mt" / "0" / "_CHECKPOINT_METADATA").read_text())
    assert metadata["custom_metadata"] == {"scan_layers": scanned}


@pytest.mark.parametrize(("name", "source", "scanned", "ocdbt", "zarr3"), STOCK)
def test_orbax_restores_what_is_written(name, source, scanned, ocdbt, zarr3, tmp_path):
    items, _ = run(
        fixture(source, tmp_path),
        tmp_path / "mt",
        "maxtext",
        scan_layers=scanned,
        checkpoint_storage_use_ocdbt=ocdbt,
        checkpoint_storage_use_zarr3=zarr3,
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        ours = checkpointer.restore(str(items))
    assert set(ours) == {"params", "opt_state", "step"}
    embedding = ours["params"]["params"]["token_embedder"]["embedding"]
    opened = open_maxtext(items)
    assert np.asarray(embedding).tobytes() == opened.reader.read("params.params.token_embedder.embedding").tobytes()


@pytest.mark.parametrize(
    ("source", "tree", "scanned"),
    [
        (LLAMA, "llama_scan", True),
        (LLAMA, "llama_unscan", False),
        (GEMMA, "gemma4_scan", True),
        (GEMMA, "gemma4_unscan", False),
    ],
)
def test_names_and_shapes_are_those_of_the_published_trees(source, tree, scanned, tmp_path):
    config = json.loads((fixture(source, tmp_path) / "config.json").read_text())
    lines = (FIXTURES / "trees" / f"{tree}.txt").read_text().splitlines()
    found = [re.match(r"(\S+) \(([^)]*)\) ", line) for line in lines]
    want = {m[1]: tuple(int(n) for n in m[2].split(",") if n.strip()) for m in found}
    assert want.pop("step") == ()
    got = {f"params.params.{leaf.name}": leaf.shape for leaf in leaves(family_of(config), scanned)}
    assert got == want


def test_what_a_maxtext_rl_run_left_is_read(tmp_path):
    """Its weights moved, so that the way back is the check: written again they are the same arrays."""
    stock = fixture("llama31_tiny2L_rl_model_params", tmp_path)
    hf, _ = run(stock, tmp_path / "hf", "hf", hf_model_path=str(FIXTURES / LLAMA))
    before, after = text_tensors(FIXTURES / LLAMA), load_file(hf / "model.safetensors")
    assert {n: (a.shape, a.dtype) for n, a in after.items()} == {n: (a.shape, a.dtype) for n, a in before.items()}
    moved = max(np.abs(after[n].astype(np.float32) - before[n].astype(np.float32)).max() for n in before)
    assert 0 < moved < 0.05
    items, _ = run(hf, tmp_path / "mt", "maxtext")
    assert raw(arrays(open_maxtext(items))) == raw(arrays(open_maxtext(stock)))


def test_the_tutorials_command_lines_are_understood(tmp_path):
    """Workflow A's and B's flags, as they are written there."""
    from burnish.config.overrides import load_config

    source = fixture(LLAMA, tmp_path)
    a = (
        f"--hf_model_path={source} base_output_directory={tmp_path / 'a'} scan_layers=True use_multimodal=False "
        "hardware=cpu skip_jax_distributed_system=true checkpoint_storage_use_zarr3=1 "
        "checkpoint_storage_use_ocdbt=1 --lazy_load_tensors=False"
    )
    b = (
        f"hf_access_token=x --hf_model_path={source} base_output_directory={tmp_path / 'b'} scan_layers=False "
        "use_multimodal=False skip_jax_distributed_system=true checkpoint_storage_use_zarr3=0 "
        "checkpoint_storage_use_ocdbt=0 hardware=cpu --lazy_load_tensors=True"
    )
    for words, scanned in ((a, True), (b, False)):
        items = to_maxtext(load_config(ToMaxTextConfig, words.split()), Console(quiet=True))
        assert items.name == "items"
        assert open_maxtext(items).scanned is scanned
        back = (
            f"hf_access_token=x load_parameters_path={items} base_output_directory={items}-hf "
            f"skip_jax_distributed_system=true hardware=cpu scan_layers={scanned} use_multimodal=False "
            "weight_dtype=bfloat16 --override_model_architecture"
        )
        out = to_huggingface(load_config(ExportConfig, back.split()), Console(quiet=True))
        assert raw(load_file(out / "model.safetensors")) == raw(text_tensors(source))


def test_the_vision_tower_is_left_out_and_said_to_be(tmp_path):
    items, text = run(fixture(GEMMA, tmp_path), tmp_path / "mt", "maxtext")
    assert "Left out" in text
    assert "model.vision_tower" in text
    assert not any("vision" in name for name in open_maxtext(items).stored)


# ---- against arithmetic written down here ----


def llama(tmp_path, dtype=ml_dtypes.bfloat16, **changes):
    config = BASE | LLAMA3_ROPE | {"torch_dtype": np.dtype(dtype).name} | changes
    tensors = {n: a.astype(dtype) for n, a in random_tensors(config).items()}
    return write_checkpoint(tmp_path / "source", config, tensors), tensors


def interleaved(rows, width):
    """Rows of each head from half-split to pairs, one by one."""
    out = np.empty_like(rows)
    for head in range(len(rows) // width):
        for i in range(width // 2):
            out[head * width + 2 * i] = rows[head * width + i]
            out[head * width + 2 * i + 1] = rows[head * width + width // 2 + i]
    return out


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_query_and_key_are_reordered_and_scaled_as_maxtext_does(dtype, tmp_path):
    source, tensors = llama(tmp_path, dtype)  # heads of 8: the factor 1/√8 is not exact
    items, _ = run(source, tmp_path / "mt", "maxtext", scan_layers=False)
    found = arrays(open_maxtext(items))
    q = interleaved(tensors["model.layers.1.self_attn.q_proj.weight"], 8).T.reshape(32, 4, 8)
    want = (q.astype(np.float32) * np.float32(1 / math.sqrt(8))).astype(dtype)
    assert found["decoder.layers_1.self_attention.query.kernel"].tobytes() == want.tobytes()
    k = interleaved(tensors["model.layers.1.self_attn.k_proj.weight"], 8).T.reshape(32, 2, 8)
    assert found["decoder.layers_1.self_attention.key.kernel"].tobytes() == k.tobytes()


def test_a_round_trip_changes_q_by_one_ulp_at_most_and_nothing_else(tmp_path):
    source, tensors = llama(tmp_path)
    items, _ = run(source, tmp_path / "mt", "maxtext")
    out, _ = run(items, tmp_path / "hf", "hf")
    back = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        apart = np.abs(back[name].view(np.int16).astype(int) - tensor.view(np.int16).astype(int))
        assert apart.max() <= (1 if "q_proj" in name else 0), name


@pytest.mark.parametrize("scanned", [True, False])
def test_rows_are_only_reordered_for_llama_3_1_rope(scanned, tmp_path):
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    items, _ = run(source, tmp_path / "mt", "maxtext", scan_layers=scanned)
    name = "decoder.layers.self_attention.key.kernel" if scanned else "decoder.layers_0.self_attention.key.kernel"
    key = arrays(open_maxtext(items))[name]
    key = key[:, 0] if scanned else key
    assert np.array_equal(key.reshape(32, 16).T, random_tensors(BASE)["model.layers.0.self_attn.k_proj.weight"])


def test_pieces_make_no_difference(tmp_path, monkeypatch):
    """A checkpoint cut into the smallest pieces and chunks is the same as in one."""
    from burnish.checkpoints import transfer

    source, _ = llama(tmp_path)
    whole, _ = run(source, tmp_path / "whole", "maxtext")
    monkeypatch.setattr(transfer, "PIECE_BYTES", 100)
    monkeypatch.setattr(transfer, "SMALL_LEAF_BYTES", 0)
    for ocdbt in (True, False):
        cut, _ = run(source, tmp_path / f"cut-{ocdbt}", "maxtext", checkpoint_storage_use_ocdbt=ocdbt)
        assert raw(arrays(open_maxtext(cut))) == raw(arrays(open_maxtext(whole)))
        chunks = open_maxtext(cut).array("decoder.layers.mlp.wi_0.kernel").chunks
        assert chunks == (32, 1, 1)
        a, _ = run(cut, tmp_path / f"a-{ocdbt}", "hf")
        b, _ = run(whole, tmp_path / f"b-{ocdbt}", "hf")
        assert raw(load_file(a / "model.safetensors")) == raw(load_file(b / "model.safetensors"))


def test_fused_experts_are_cut_and_put_together_again(tmp_path, monkeypatch):
    from burnish.checkpoints import transfer

    monkeypatch.setattr(transfer, "PIECE_BYTES", 5000)
    monkeypatch.setattr(transfer, "SMALL_LEAF_BYTES", 0)
    items, _ = run(fixture(GEMMA, tmp_path), tmp_path / "mt", "maxtext")
    out, _ = run(items, tmp_path / "hf", "hf")
    assert raw(load_file(out / "model.safetensors")) == raw(text_tensors(FIXTURES / GEMMA))


# ---- families without fixtures: every tensor has one place, and comes back ----

GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 64,
}
MOE = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
}
OTHERS = {
    "gemma3": GEMMA3,
    "qwen2": MOE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": MOE | {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": MOE | {"model_type": "qwen3_moe", "num_experts": 5, "moe_intermediate_size": 24},
    "mistral": MOE | {"model_type": "mistral"},
    "mixtral": MOE | {"model_type": "mixtral", "num_local_experts": 3},
}


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_every_tensor_has_its_place_and_comes_back(name, scanned, tmp_path):
    config = OTHERS[name]
    shapes = hf_tensors(leaves(family_of(config), scanned))
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(0, 1, s).astype(np.float32) for n, s in shapes.items()}
    source = write_checkpoint(tmp_path / "source", config, tensors)
    items, _ = run(source, tmp_path / "mt", "maxtext", scan_layers=scanned)
    assert sum(a.size for a in arrays(open_maxtext(items)).values()) == sum(a.size for a in tensors.values())
    out, _ = run(items, tmp_path / "hf", "hf")
    back = load_file(out / "model.safetensors")
    for n, tensor in tensors.items():
        np.testing.assert_allclose(back[n], tensor, rtol=1e-6, atol=1e-6, err_msg=n)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BASE | {"attention_bias": True}, "attention_bias is true"),
        (GEMMA3 | {"tie_word_embeddings": False}, "no head of its own"),
        (GEMMA3 | {"layer_types": ["sliding_attention"] * 8}, "every sixth layer global"),
        (OTHERS["qwen3_moe"] | {"decoder_sparse_step": 2}, "experts in every layer or in none"),
        (BASE | {"model_type": "bert"}, "model_type is 'bert'"),
        ({k: v for k, v in GEMMA3.items() if k != "vocab_size"}, "lacks vocab_size"),
    ],
)
def test_what_maxtext_has_no_layout_for_is_refused_by_name(config, message):
    with pytest.raises(CheckpointError, match=message):
        family_of(config)


def test_gemma_3_norms_and_embeddings_carry_one_and_the_root_of_the_width(tmp_path):
    shapes = hf_tensors(leaves(family_of(GEMMA3), True))
    tensors = {n: np.full(s, 0.25, np.float32) for n, s in shapes.items()}
    source = write_checkpoint(tmp_path / "source", GEMMA3, tensors)
    items, _ = run(source, tmp_path / "mt", "maxtext")
    found = arrays(open_maxtext(items))
    root = float(ml_dtypes.bfloat16(math.sqrt(32)))  # rounded as MaxText rounds it
    assert np.all(found["token_embedder.embedding"] == np.float32(0.25 * root))
    assert np.all(found["decoder.decoder_norm.scale"] == 1.25)
    assert found["decoder.layers.layers_5.pre_ffw_norm.scale"].shape == (32, 1)
    assert found["decoder.layers_remainder.layers_1.pre_ffw_norm.scale"].shape == (32,)


def test_experts_are_stacked_before_layers(tmp_path):
    config = OTHERS["mixtral"]
    shapes = hf_tensors(leaves(family_of(config), True))
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(0, 1, s).astype(np.float32) for n, s in shapes.items()}
    source = write_checkpoint(tmp_path / "source", config, tensors)
    items, _ = run(source, tmp_path / "mt", "maxtext")
    wi_1 = arrays(open_maxtext(items))["decoder.layers.MoeBlock_0.wi_1"]
    assert wi_1.shape == (3, 3, 32, 48)
    assert np.array_equal(wi_1[2, 1], tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"].T)
