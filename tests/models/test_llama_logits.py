"""The decoder against transformers, and against itself where the same tokens are laid out differently."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_variants import VARIANTS, probe_tokens, random_tensors, variant_config, write_checkpoint
from logits import logits_of

from burnish.checkpoints.hf_import import load_params
from burnish.models.decoder import forward, unembed

REFERENCES = Path(__file__).parents[1] / "references" / "llama_variants.npz"


def load_variant(name, tmp_path):
    config = variant_config(name)
    return load_params(write_checkpoint(tmp_path / name, config, random_tensors(config)))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    spec, params = load_variant(name, tmp_path)
    got = logits_of(spec, params, probe_tokens(variant_config(name)))[0]
    want = np.load(REFERENCES)[name]
    assert np.abs(got - want).max() < 1e-4
    assert (got.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.torch
@pytest.mark.parametrize("name", VARIANTS)
def test_committed_references_are_those_of_the_installed_transformers(name):
    pytest.importorskip("torch")
    from make_references import variant_logits

    assert np.abs(variant_logits(name) - np.load(REFERENCES)[name]).max() < 1e-5


def test_references_tell_the_variants_apart():
    """Every variation changes the logits, so that ignoring one cannot pass. The two places of one rope
    setting are the same model.
    """
    references = np.load(REFERENCES)
    assert set(references.files) == set(VARIANTS)
    same_shape = [n for n in VARIANTS if variant_config(n)["hidden_size"] == 32 and n != "grouped_query"]
    for name in same_shape:
        assert np.abs(references[name] - references["grouped_query"]).max() > 1e-2, name
    for kind in ("llama3", "linear"):
        assert np.array_equal(references[f"{kind}_rope_old_place"], references[f"{kind}_rope_new_place"])


LAYOUTS = ("left_padded", "right_padded", "packed_after_another", "packed_before_another")


@pytest.mark.parametrize("pad_embedding", [None, 1e3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_and_packing_do_not_change_logits(layout, pad_embedding, tmp_path):
    spec, params = load_variant("llama3_rope_old_place", tmp_path)
    if pad_embedding is not None:
        params["embed"][0] = pad_embedding
    x, y, pad = probe_tokens(variant_config("grouped_query"), 19)[0], np.arange(3, 10), np.zeros(7, int)
    n, m = len(x), 7
    alone = logits_of(spec, params, x[None])[0]
    before = layout in ("left_padded", "packed_after_another")
    other, segment = (pad, 0) if "padded" in layout else (y, 2)
    parts = [(other, np.arange(m), np.full(m, segment)), (x, np.arange(n), np.ones(n, int))]
    parts = parts if before else parts[::-1]
    row, positions, segments = (np.concatenate(p)[None] for p in zip(*parts, strict=True))
    got = logits_of(spec, params, row, positions, segments)[0]
    assert np.abs(got[m:] - alone if before else got[:n] - alone).max() < 1e-5


def test_branches_of_a_shared_prefix_equal_separate_sequences(tmp_path):
    spec, params = load_variant("grouped_query", tmp_path)
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 64, 11)
    completions = [rng.integers(3, 64, n) for n in (5, 1, 8)]
    row = np.concatenate([prompt, *completions])[None]
    positions = np.concatenate([np.arange(11), *(11 + np.arange(len(c)) for c in completions)])[None]
    branches = np.concatenate([np.zeros(11, int), *(np.full(len(c), g + 1) for g, c in enumerate(completions))])[None]
    got = logits_of(spec, params, row, positions, np.ones_like(row), branches)[0]
    start = 11
    for c in completions:
        alone = logits_of(spec, params, np.concatenate([prompt, c])[None])[0]
        assert np.abs(got[start : start + len(c)] - alone[11:]).max() < 1e-5
        start += len(c)
    assert np.abs(got[:11] - alone[:11]).max() < 1e-5


def test_gradients_are_finite_and_the_same_with_rows_of_padding(tmp_path):
    spec, params = load_variant("grouped_query", tmp_path)
    tokens = probe_tokens(variant_config("grouped_query"), 9)

    def loss(params, tokens, segments):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits = unembed(spec, params, forward(spec, params, tokens, positions, segments))
        return jnp.sum(jnp.where(segments[..., None] != 0, jax.nn.log_softmax(logits), 0.0)[..., 3])

    ones = jnp.ones((1, 9), jnp.int32)
    alone = jax.grad(loss)(params, jnp.asarray(tokens), ones)
    rows = jnp.concatenate([jnp.asarray(tokens), jnp.zeros((2, 9), jnp.int32)])
    padded = jax.grad(loss)(params, rows, jnp.concatenate([ones, jnp.zeros((2, 9), jnp.int32)]))
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(padded), strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
