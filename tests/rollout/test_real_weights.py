"""The engine on SmolLM2-135M-Instruct: its logprobs are those of the training forward pass, and greedy text is text.

Needs BURNISH_SMOLLM2=<Hugging Face directory of SmolLM2-135M-Instruct>.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_reference import log_softmax

from burnish.checkpoints.hf_import import load_params
from burnish.data.tokenizer import load_tokenizer
from burnish.data.types import Prompt
from burnish.models import decoder
from burnish.models.params import Params
from burnish.models.spec import ModelSpec
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import SamplingParams

DIRECTORY = os.environ.get("BURNISH_SMOLLM2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DIRECTORY is None, reason="BURNISH_SMOLLM2 does not name a SmolLM2-135M-Instruct directory"),
]


@partial(jax.jit, static_argnums=0)
def forward_logits(spec: ModelSpec, params: Params, ids: jax.Array) -> jax.Array:
    positions = jnp.arange(ids.shape[1])[None]
    return decoder.unembed(spec, params, decoder.forward(spec, params, ids, positions, jnp.ones_like(ids)))


def test_logprobs_and_greedy_text_of_real_weights() -> None:
    assert DIRECTORY is not None
    spec, params = load_params(DIRECTORY)
    tokenizer = load_tokenizer(DIRECTORY)
    rendered = tokenizer.render_prompt("What is the capital of France? Answer in one sentence.")
    prompt = Prompt(0, "", "", rendered.text, rendered.token_ids)
    engine = BuiltinEngine(
        spec, tokenizer.decode, max_slots=4, max_prompt_tokens=64, max_total_tokens=96, dtype=jnp.float32
    )
    engine.load_weights(params, version=0)
    stop = tokenizer.stop_token_ids
    sampled = SamplingParams(96, temperature=0.8, top_k=50, top_p=0.95, stop_token_ids=stop)
    for sampling in (sampled, SamplingParams(96, temperature=0.0, stop_token_ids=stop)):
        (group,) = engine.generate([prompt], [[1, 2]], sampling)
        for completion in group.completions:
            ids = jnp.asarray([[*prompt.token_ids, *completion.token_ids.tolist()]])
            logits = np.asarray(forward_logits(spec, params, ids), np.float64)[0, len(prompt.token_ids) - 1 : -1]
            expected = log_softmax(logits / (sampling.temperature or 1.0))
            rows = np.arange(len(completion.token_ids))
            np.testing.assert_allclose(completion.logprobs, expected[rows, completion.token_ids], atol=2e-3)
            if sampling.temperature == 0:
                assert (logits.argmax(axis=1) == completion.token_ids).all()
                assert "Paris" in completion.text
