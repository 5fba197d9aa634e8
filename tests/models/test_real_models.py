"""Real weights against transformers, and what the models say: SmolLM2-135M-Instruct, and Gemma 3 270M with a text that
is longer than its window.

Those run whose Hugging Face directory BURNISH_SMOLLM2 or BURNISH_GEMMA3 names (tools/smollm2_from_package.py and
tools/gemma3_from_package.py make them). The reference values are those of their dequantised weights.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from logits import REFERENCES, assert_equal_to_reference, padded_logits

from burnish.checkpoints.hf_import import load_params

MODELS = {
    "smollm2": ("BURNISH_SMOLLM2", "smollm2-135m-Instruct", "smollm2_135m.npz"),
    "gemma3": ("BURNISH_GEMMA3", "gemma3-270m", "gemma3_270m.npz"),
}

pytestmark = pytest.mark.slow


def directory_of(name):
    variable, *_ = MODELS[name]
    if variable not in os.environ:
        pytest.skip(f"{variable} names no directory of {name}")
    return os.environ[variable]


@pytest.fixture(scope="module")
def load():
    """load(name): a model, read once."""
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = load_params(directory_of(name), MODELS[name][1])
        return loaded[name]

    return load


def said_after(name, model, prompt, count):
    """The text of the `count` likeliest tokens after a prompt, up to the end of the turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory_of(name))
    if isinstance(prompt, str):
        start = tokenizer(prompt)["input_ids"]
    else:
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    ids = list(start)
    while len(ids) < len(start) + count and ids[-1] != tokenizer.eos_token_id:
        ids.append(int(padded_logits(model, ids, 64)[-1].argmax()))
    return tokenizer.decode(ids[len(start) :])


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_committed_ones_of_transformers(load, name, i):
    assert_equal_to_reference(load(name), MODELS[name][2], i, length=64)


def test_logits_beyond_the_window_equal_the_committed_ones_of_transformers(load):
    """6e-4 was seen at single tokens on both sides of the window's 512, 2e-5 in the median; logits reach 45."""
    model = load("gemma3")
    assert len(np.load(REFERENCES / "gemma3_270m.npz")["ids_3"]) > model[0].at(0).window
    assert_equal_to_reference(model, "gemma3_270m.npz", 3, length=768, tolerance=1e-3)


@pytest.mark.torch
def test_logits_equal_those_of_the_installed_transformers(load):
    pytest.importorskip("torch")
    from make_references import transformers_logits

    model = load("smollm2")
    ids = np.load(REFERENCES / "smollm2_135m.npz")["ids_1"]
    want = transformers_logits(Path(directory_of("smollm2")), ids[None])[0]
    got = padded_logits(model, ids, 64)
    # Over the whole vocabulary 9e-5 was seen; logits reach 41, where float32 resolves 4e-6.
    assert np.abs(got - want).max() < 2e-4
    assert (got.argmax(-1) == want.argmax(-1)).all()


def test_the_capital_of_france_is_paris(load):
    message = [{"role": "user", "content": "What is the capital of France?"}]
    text = said_after("smollm2", load("smollm2"), message, 12)
    assert text == "The capital of France is Paris.<|im_end|>"


def test_it_counts_on(load):
    assert said_after("gemma3", load("gemma3"), "one, two, three, four,", 6).startswith(" five, six,")
