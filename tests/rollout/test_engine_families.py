"""The engine on every family: caches per kind of layer, windows, soft caps, experts, against the training forward
pass and, through its committed logits, transformers."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from family_variants import ONE_OF_EACH, family_config, family_tensors
from llama_variants import probe_tokens, write_checkpoint
from rollout_reference import decode_text, log_softmax, make_prompt, reference_logprobs

from burnish.checkpoints.hf_import import load_params
from burnish.data.types import Prompt
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import SamplingParams

REFERENCES = Path(__file__).parents[1] / "references"


def engine_of(name, tmp_path, max_slots=4):
    config = family_config(name)
    spec, params = load_params(write_checkpoint(tmp_path / name, config, family_tensors(config)))
    engine = BuiltinEngine(
        spec, decode_text, max_slots=max_slots, max_prompt_tokens=64, max_total_tokens=200, dtype="float32"
    )
    engine.load_weights(params, version=0)
    return spec, params, engine


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_logprobs_equal_the_training_forward_pass(name, tmp_path):
    """Prompts and completions longer than the window, of unequal lengths, more completions than slots."""
    spec, params, engine = engine_of(name, tmp_path)
    prompts = [make_prompt(n, seed=n) for n in (1, 5, 21)]
    prompts = [Prompt(p.index, "", "", "", tuple(t % 64 for t in p.token_ids)) for p in prompts]
    sampling = SamplingParams(max_total_tokens=60, temperature=0.9, stop_token_ids=(2,))
    for group in engine.generate(prompts, [[1, 2, 3]] * 3, sampling):
        for completion in group.completions:
            want = reference_logprobs(params, group.prompt, completion.token_ids, 0.9, spec)
            assert np.abs(completion.logprobs - want).max() < 2e-5


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_each_step_with_a_cache_has_the_logits_of_transformers(name, tmp_path):
    """Sampling 1 token after each prefix of the probe: the engine's logprob is that of transformers' logits."""
    _, _, engine = engine_of(name, tmp_path, max_slots=16)
    tokens = probe_tokens(family_config(name))[0]
    want = log_softmax(np.load(REFERENCES / "family_variants.npz")[name].astype(np.float64))
    lengths = (1, 2, 8, 16, 31, 47)
    prompts = [Prompt(n, "", "", "", tuple(tokens[:n].tolist())) for n in lengths]
    greedy = SamplingParams(max_total_tokens=48, temperature=0.0, ignore_stop=True)
    for n, group in zip(lengths, engine.generate(prompts, [[0]] * len(prompts), greedy), strict=True):
        completion = group.completions[0]
        assert completion.token_ids[0] == want[n - 1].argmax()
        assert abs(completion.logprobs[0] - want[n - 1].max()) < 1e-4
