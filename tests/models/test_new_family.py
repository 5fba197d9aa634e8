"""A family from outside the package: docs/guides/new-model.md, followed to the letter."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_variants import write_checkpoint
from rich.console import Console

from burnish.checkpoints.export_command import to_huggingface
from burnish.checkpoints.hf_export import snapshot_source
from burnish.checkpoints.hf_import import load_params
from burnish.checkpoints.store import TrainingStore
from burnish.config.schema import ExportConfig
from burnish.models import families
from burnish.models.decoder import forward, unembed

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "new-model.md"


@pytest.fixture
def toy():
    """The module that the guide shows, registered as it says."""
    code = next(c for c in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "FAMILY =" in c)
    namespace = {}
    exec(compile(code, str(GUIDE), "exec"), namespace)
    families.register(namespace["FAMILY"])
    yield namespace["FAMILY"]
    for name in namespace["FAMILY"].model_types:
        del families._FAMILIES[name]
    for name in namespace["FAMILY"].presets:
        del families.PRESETS[name]


def toy_checkpoint(directory):
    config = dict(families.preset_config("toy-tiny"))
    rng = np.random.default_rng(0)
    mappings = families.tensor_map(families.spec_from_hf(config))
    tensors = {m.name: rng.standard_normal(m.hf_shape).astype(np.float32) for m in mappings}
    return write_checkpoint(directory, config, tensors), tensors


def test_a_family_from_outside_is_read_run_and_written_back(toy, tmp_path):
    source, tensors = toy_checkpoint(tmp_path / "source")
    spec, params = load_params(source, "toy-tiny")
    tokens = jnp.arange(3, 13)[None]
    hidden = forward(spec, params, tokens, jnp.arange(10)[None], jnp.ones((1, 10), jnp.int32))
    logits = unembed(spec, params, hidden)
    assert logits.shape == (1, 10, spec.vocab_size)
    assert np.isfinite(logits).all()
    snapshot_source(source, tmp_path / "snapshot")
    TrainingStore(tmp_path / "run", keep=1).save(1, params, {}, {}, hf_source=tmp_path / "snapshot")
    config = ExportConfig(load_parameters_path=str(tmp_path / "run" / "1"), base_output_directory=str(tmp_path / "out"))
    to_huggingface(config, Console(quiet=True))
    again, same = load_params(tmp_path / "out")
    assert again == spec
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True))
    assert set(tensors) == {m.name for m in families.tensor_map(spec)}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "toy"


def test_what_the_toy_family_says_is_what_is_computed(toy, tmp_path):
    """Its logits by NumPy in float64, from the tensors by the names of the file."""
    source, w = toy_checkpoint(tmp_path / "source")
    spec, params = load_params(source)
    tokens = np.arange(3, 13)
    hidden = forward(spec, params, jnp.asarray(tokens)[None], jnp.arange(10)[None], jnp.ones((1, 10), jnp.int32))
    got = np.asarray(unembed(spec, params, hidden))[0]
    w = {k: v.astype(np.float64) for k, v in w.items()}

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.rms_norm_eps) * scale

    freq = 1 / 10_000.0 ** (np.arange(0, 8, 2) / 8)
    angle = np.arange(10)[:, None] * freq

    def rotated(x):  # (T, heads, N)
        a, b = x[..., :4], x[..., 4:]
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    x = w["model.embed_tokens.weight"][tokens]
    distance = np.arange(10)[:, None] - np.arange(10)
    for i in range(spec.num_layers):
        p = {k.removeprefix(f"model.layers.{i}."): v for k, v in w.items() if k.startswith(f"model.layers.{i}.")}
        h = norm(x, p["norm_1.weight"])
        q, k, v = (
            (h @ p[f"self_attn.{n}_proj.weight"].T).reshape(10, heads, 8) for n, heads in (("q", 4), ("k", 2), ("v", 2))
        )
        q, k = rotated(q), rotated(k)
        seen = (distance >= 0) & (distance < 4 if i % 2 == 0 else True)
        out = np.zeros((10, 4, 8))
        for head in range(4):
            scores = np.where(seen, q[:, head] @ k[:, head // 2].T / np.sqrt(8), -np.inf)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = probs / probs.sum(-1, keepdims=True) @ v[:, head // 2]
        x = x + out.reshape(10, 32) @ p["self_attn.o_proj.weight"].T
        h = norm(x, p["norm_2.weight"])
        gate = h @ p["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
    want = norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_a_name_that_is_taken_is_refused(toy):
    with pytest.raises(ValueError, match="toy, toy-tiny is known already"):
        families.register(toy)
