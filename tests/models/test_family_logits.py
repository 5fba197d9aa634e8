"""Every family against transformers, and against itself where the same tokens are laid out differently."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_variants import (
    MULTIMODAL,
    ONE_OF_EACH,
    VARIANTS,
    family_config,
    family_tensors,
    gradient_sketch,
    multimodal,
    trained_mask,
)
from llama_variants import probe_tokens, write_checkpoint
from logits import logits_of

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_import import left_out_tensors, load_params
from burnish.models.decoder import forward, forward_with_load, unembed
from burnish.models.families import tensor_map
from burnish.models.moe import Routing, apply_experts

REFERENCES = Path(__file__).parents[1] / "references"


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """(spec, params) of a variant; read once."""
    loaded = {}

    def get(name, alike_experts=True):
        if (name, alike_experts) not in loaded:
            config = family_config(name)
            tensors = family_tensors(config, alike_experts)
            loaded[name, alike_experts] = load_params(write_checkpoint(tmp_path_factory.mktemp(name), config, tensors))
        spec, params = loaded[name, alike_experts]
        return spec, jax.tree.map(np.copy, params)

    return get


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name, load):
    spec, params = load(name)
    got = logits_of(spec, params, probe_tokens(family_config(name)))[0]
    want = np.load(REFERENCES / "family_variants.npz")[name]
    assert np.abs(got - want).max() < 1e-4
    assert (got.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.torch
@pytest.mark.parametrize("name", VARIANTS)
def test_committed_references_are_those_of_the_installed_transformers(name):
    pytest.importorskip("torch")
    from make_references import family_logits

    assert np.abs(family_logits(name) - np.load(REFERENCES / "family_variants.npz")[name]).max() < 1e-5


def test_references_tell_the_variants_apart():
    references = np.load(REFERENCES / "family_variants.npz")
    assert set(references.files) == set(VARIANTS)
    for name in VARIANTS:
        family = next(n for n in VARIANTS if VARIANTS[n]["model_type"] == VARIANTS[name]["model_type"])
        if name != family:
            assert np.abs(references[name] - references[family]).max() > 1e-2, name


@pytest.mark.parametrize("layout", ["left_padded", "right_padded", "packed_after_another", "packed_before_another"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_padding_and_packing_do_not_change_logits(name, layout, load):
    spec, params = load(name)
    params["embed"][0] = 30.0
    x, y, pad = probe_tokens(family_config(name), 19)[0], np.arange(3, 10), np.zeros(7, int)
    alone = logits_of(spec, params, x[None])[0]
    before = layout in ("left_padded", "packed_after_another")
    other, segment = (pad, 0) if "padded" in layout else (y, 2)
    parts = [(other, np.arange(7), np.full(7, segment)), (x, np.arange(19), np.ones(19, int))]
    row, positions, segments = (np.concatenate(p)[None] for p in zip(*parts[:: 1 if before else -1], strict=True))
    got = logits_of(spec, params, row, positions, segments)[0]
    assert np.abs((got[7:] if before else got[:19]) - alone).max() < 2e-5


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_branches_of_a_shared_prefix_equal_separate_sequences(name, load):
    """With a window, a completion's reaches back into the prompt, and not by where things lie in the row."""
    spec, params = load(name)
    rng = np.random.default_rng(0)
    prompt, completions = rng.integers(3, 64, 11), [rng.integers(3, 64, n) for n in (5, 1, 8)]
    lengths = [len(c) for c in completions]
    row = np.concatenate([prompt, *completions])[None]
    positions = np.concatenate([np.arange(11), *(11 + np.arange(n) for n in lengths)])[None]
    branches = np.repeat([0, 1, 2, 3], [11, *lengths])[None]
    got = logits_of(spec, params, row, positions, np.ones_like(row), branches)[0]
    start = 11
    for c in completions:
        alone = logits_of(spec, params, np.concatenate([prompt, c])[None])[0]
        assert np.abs(got[start : start + len(c)] - alone[11:]).max() < 2e-5
        start += len(c)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma4"])
def test_long_rows_in_blocks_equal_short_ones(name, load):
    """Rows long enough for attention by blocks: windows and soft caps, forward and backward."""
    spec, params = load(name)
    spec = replace(spec, num_layers=len(spec.pattern))
    params = {**params, "layers": jax.tree.map(lambda a: a[:1], params["layers"])}
    params.pop("tail", None)
    if len(spec.pattern) == 1:
        params["layers"] = jax.tree.map(lambda a: a[: spec.num_layers], params["layers"])
    T, n = 384, 120
    x = np.random.default_rng(3).integers(3, 64, (3, n))
    long_row = np.zeros((1, T), int)
    long_row[0, : 3 * n] = x.reshape(-1)
    positions = np.concatenate([np.tile(np.arange(n), 3), np.zeros(T - 3 * n, int)])[None]
    segments = np.concatenate([np.repeat([1, 2, 3], n), np.zeros(T - 3 * n, int)])[None]

    def total(params, row, positions, segments):
        logits = unembed(spec, params, forward(spec, params, row, positions, segments))
        return jnp.sum(jnp.where(segments[..., None] != 0, jax.nn.log_softmax(logits), 0.0)[..., 5])

    grads = jax.jit(jax.value_and_grad(total))
    value, got = grads(params, jnp.asarray(long_row), jnp.asarray(positions), jnp.asarray(segments))
    short = (jnp.asarray(x), jnp.broadcast_to(jnp.arange(n), x.shape), jnp.ones(x.shape, jnp.int32))
    expected, want = grads(params, *short)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-5


def gradients_of(spec, params, tokens):
    """By tensor name of the checkpoint: the gradient of the masked log-likelihood."""
    mask = jnp.asarray(trained_mask(tokens.shape[1]))

    @jax.jit
    @jax.grad
    def gradient(params):
        positions = jnp.arange(tokens.shape[1])[None]
        hidden = forward(spec, params, jnp.asarray(tokens), positions, jnp.ones_like(positions))
        logprobs = jax.nn.log_softmax(unembed(spec, params, hidden)[0, :-1])
        chosen = jnp.take_along_axis(logprobs, jnp.asarray(tokens)[0, 1:, None], axis=-1)[:, 0]
        return jnp.sum(jnp.where(mask, chosen, 0.0))

    grads = jax.tree.map(np.asarray, gradient(params))
    return {m.name: m.to_hf(m.slot(grads)) for m in tensor_map(spec)}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradients_equal_those_of_torch(name, load):
    spec, params = load(name, alike_experts=False)
    got = gradients_of(spec, params, probe_tokens(family_config(name)))
    scalars = [n for n in got if n.endswith("layer_scalar")]
    assert all((got.pop(n) == 0).all() for n in scalars)  # a buffer in transformers: never trained
    want = np.load(REFERENCES / "family_gradients.npz")[name]
    sketch = gradient_sketch(got)
    norms = want[:, 0]
    assert norms.max() > 0.1
    small = 1e-6 * norms.max()  # of experts that got no token
    assert (np.abs(sketch - want).max(-1) <= 1e-4 * norms + small).all()


@pytest.mark.torch
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_gradient_equals_torchs_anew(name, load):
    pytest.importorskip("torch")
    from make_references import family_gradients

    spec, params = load(name, alike_experts=False)
    want = family_gradients(name)
    got = gradients_of(spec, params, probe_tokens(family_config(name)))
    largest = max(np.linalg.norm(g) for g in want.values())
    for tensor, g in want.items():
        assert np.linalg.norm(got[tensor] - g) <= 1e-4 * np.linalg.norm(g) + 1e-6 * largest, tensor


MIXTURES = ("qwen3_moe", "mixtral", "gemma4_experts")


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_give_a_token_the_same_whatever_its_company(name, load):
    """Order of tokens, other rows, and micro-batches do not change a sequence's logits."""
    spec, params = load(name)
    x = np.random.default_rng(5).integers(3, 64, (6, 12))
    together = logits_of(spec, params, x)
    reordered = logits_of(spec, params, x[::-1])[::-1]
    alone = np.concatenate([logits_of(spec, params, x[i : i + 1]) for i in range(6)])
    assert np.abs(together - reordered).max() < 2e-5
    assert np.abs(together - alone).max() < 2e-5


def test_experts_equal_a_loop_over_tokens(load):
    spec, params = load("qwen3_moe")
    p = {k: v[0] for k, v in params["layers"].items()}
    rng = np.random.default_rng(0)
    x = rng.standard_normal((10, 32)).astype(np.float32)
    chosen = rng.integers(0, 8, (10, 3))  # also the same expert twice, and experts without tokens
    weights = rng.random((10, 3)).astype(np.float32)
    routing = Routing(jnp.asarray(chosen), jnp.asarray(weights), jnp.zeros(10))
    got = apply_experts(spec, p, jnp.asarray(x), routing, jax.nn.silu)
    gate_up, down = p["expert_gate_up_proj"].astype(np.float64), p["expert_down_proj"].astype(np.float64)
    want = np.zeros((10, 32))
    for t in range(10):
        for e, w in zip(chosen[t], weights[t], strict=True):
            gate, up = x[t] @ gate_up[e, :, 0], x[t] @ gate_up[e, :, 1]
            want[t] += w * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
    assert np.abs(got - want).max() < 1e-5


@pytest.mark.parametrize("name", ["qwen3_moe_every_second_layer", "gemma4_experts"])
def test_load_counts_every_choice_of_the_tokens_that_count(name, load):
    spec, params = load(name)
    x = probe_tokens(family_config(name), 20)
    segments = np.ones((1, 20), np.int32)
    segments[0, 13:] = 0
    rows = (jnp.asarray(x), jnp.arange(20)[None], jnp.asarray(segments), None)
    _, load_ = forward_with_load(spec, params, *rows, jnp.asarray(segments != 0))
    layers = sum(spec.at(i).experts is not None for i in range(spec.num_layers))
    assert load_.tokens.shape == (layers, 8)
    assert np.allclose(load_.tokens.sum(-1), 13 * spec.experts.num_active)
    assert (load_.entropy > 0).all()
    assert (load_.entropy <= 13 * np.log(8) + 1e-4).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_has_one_place_and_the_way_back_is_exact(name, load):
    spec, params = load(name)
    tensors = family_tensors(family_config(name))
    mappings = tensor_map(spec)
    assert [m.name for m in mappings] == list(dict.fromkeys(m.name for m in mappings))
    assert {m.name for m in mappings} == set(tensors)
    counts = jax.tree.map(np.zeros_like, params)
    for m in mappings:
        assert np.array_equal(m.to_hf(m.slot(params)), tensors[m.name])
        m.slot(counts)[...] += 1
    assert all((a == 1).all() for a in jax.tree.leaves(counts))


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_part_of_a_multimodal_checkpoint_is_the_same_model(name, load, tmp_path):
    spec, params = load(name)
    config, tensors = multimodal(name)
    directory = write_checkpoint(tmp_path / "both", config, tensors)
    found, same = load_params(directory)
    assert replace(found, family=spec.family) == spec
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True))
    assert left_out_tensors(directory, found) == [MULTIMODAL[name][2]]
    unknown = write_checkpoint(tmp_path / "more", config, tensors | {"model.other.weight": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"model\.other\.weight"):
        load_params(unknown)
