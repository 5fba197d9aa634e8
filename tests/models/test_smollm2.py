"""Real weights: SmolLM2-135M-Instruct against transformers, and what it says.

Runs where BURNISH_SMOLLM2 names its Hugging Face directory (tools/smollm2_from_package.py makes one). The
reference values are those of its dequantised weights.
"""

import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.checkpoints.hf_import import load_params
from burnish.models.decoder import forward, unembed

DIRECTORY = os.environ.get("BURNISH_SMOLLM2")
REFERENCES = Path(__file__).parents[1] / "references" / "smollm2_135m.npz"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DIRECTORY is None, reason="BURNISH_SMOLLM2 names no SmolLM2-135M-Instruct directory"),
]


@pytest.fixture(scope="module")
def model():
    return load_params(DIRECTORY, "smollm2-135m-Instruct")


@partial(jax.jit, static_argnums=0)
def _logits(spec, params, tokens, segments):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return unembed(spec, params, forward(spec, params, tokens, positions, segments))


def logits_of(model, ids, length=64):
    """(n, V) of one sequence, right-padded to one length so that everything here compiles once."""
    spec, params = model
    row, segments = np.zeros((2, 1, length), np.int32)
    row[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    return np.asarray(_logits(spec, params, row, segments))[0, : len(ids)]


@pytest.mark.parametrize("i", range(3))
def test_logits_equal_the_committed_ones_of_transformers(model, i):
    reference = np.load(REFERENCES)
    got = logits_of(model, reference[f"ids_{i}"])
    top = reference[f"top_ids_{i}"]
    assert (got.argmax(-1) == top[:, 0]).all()
    assert np.abs(np.take_along_axis(got, top, -1) - reference[f"top_logits_{i}"]).max() < 1e-4
    assert np.abs(np.asarray(jax.nn.logsumexp(got, axis=-1)) - reference[f"logsumexp_{i}"]).max() < 1e-4


@pytest.mark.torch
def test_logits_equal_those_of_the_installed_transformers(model):
    pytest.importorskip("torch")
    from make_references import transformers_logits

    ids = np.load(REFERENCES)["ids_1"]
    want = transformers_logits(Path(DIRECTORY), ids[None])[0]
    got = logits_of(model, ids)
    # Over the whole vocabulary 9e-5 was seen; logits reach 41, where float32 resolves 4e-6.
    assert np.abs(got - want).max() < 2e-4
    assert (got.argmax(-1) == want.argmax(-1)).all()


def test_the_capital_of_france_is_paris(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    message = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    ids = list(prompt)
    for _ in range(12):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    assert tokenizer.decode(ids[len(prompt) :]) == "The capital of France is Paris.<|im_end|>"
