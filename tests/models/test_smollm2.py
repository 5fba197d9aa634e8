"""Real weights: SmolLM2-135M-Instruct against transformers, and what it says.

Runs where BURNISH_SMOLLM2 names its Hugging Face directory (tools/smollm2_from_package.py makes one). The
reference values are those of its dequantised weights.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from logits import REFERENCES, assert_equal_to_reference, padded_logits

from burnish.checkpoints.hf_import import load_params

DIRECTORY = os.environ.get("BURNISH_SMOLLM2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DIRECTORY is None, reason="BURNISH_SMOLLM2 names no SmolLM2-135M-Instruct directory"),
]


@pytest.fixture(scope="module")
def model():
    return load_params(DIRECTORY, "smollm2-135m-Instruct")


@pytest.mark.parametrize("i", range(3))
def test_logits_equal_the_committed_ones_of_transformers(model, i):
    assert_equal_to_reference(model, "smollm2_135m.npz", i, length=64)


@pytest.mark.torch
def test_logits_equal_those_of_the_installed_transformers(model):
    pytest.importorskip("torch")
    from make_references import transformers_logits

    ids = np.load(REFERENCES / "smollm2_135m.npz")["ids_1"]
    want = transformers_logits(Path(DIRECTORY), ids[None])[0]
    got = padded_logits(model, ids, 64)
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
        ids.append(int(padded_logits(model, ids, 64)[-1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    assert tokenizer.decode(ids[len(prompt) :]) == "The capital of France is Paris.<|im_end|>"
