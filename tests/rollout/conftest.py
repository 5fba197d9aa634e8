"""A tiny random model, and reference computations that know nothing of the engine."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.data.types import Prompt
from burnish.models import decoder
from burnish.models.params import Params, init_params
from burnish.models.spec import ModelSpec
from burnish.rollout.engine import BuiltinEngine

VOCAB = 64


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    return ModelSpec(
        family="llama", num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_mlp=64,
        vocab_size=VOCAB, rms_norm_eps=1e-5, tied_head=True, max_positions=256,
    )  # fmt: skip


def random_params(spec: ModelSpec, seed: int) -> Params:
    """std 0.3 rather than 0.02, so that logits differ enough for mistakes to show."""
    return init_params(spec, jax.random.key(seed), std=0.3)


@pytest.fixture(scope="session")
def params(spec: ModelSpec) -> Params:
    return random_params(spec, 0)


def decode_text(ids: list[int]) -> str:
    """Token i is one letter: i % 26, so 'abc' is a stop string of three tokens."""
    return "".join(chr(97 + i % 26) for i in ids)


def make_engine(
    spec: ModelSpec, params: Params, *, max_slots: int = 8, max_prompt: int = 64, max_total: int = 200
) -> BuiltinEngine:
    engine = BuiltinEngine(
        spec, decode_text, max_slots=max_slots, max_prompt_tokens=max_prompt, max_total_tokens=max_total,
        dtype=jnp.float32,
    )  # fmt: skip
    engine.load_weights(params, version=0)
    return engine


def make_prompt(length: int, seed: int = 0) -> Prompt:
    ids = np.random.default_rng(seed).integers(0, VOCAB, length)
    return Prompt(index=seed, question="", answer="", text="", token_ids=tuple(int(i) for i in ids))


def reference_logits(spec: ModelSpec, params: Params, tokens: Sequence[int]) -> np.ndarray:
    """Logits (T, V) of one sequence by the training forward pass: no cache, no batch."""
    ids = jnp.array([tokens], jnp.int32)
    hidden = decoder.forward(spec, params, ids, jnp.arange(len(tokens))[None], jnp.ones_like(ids))
    return np.asarray(decoder.unembed(params, hidden)[0])


def reference_logprobs(
    spec: ModelSpec, params: Params, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> np.ndarray:
    """log softmax(logits / temperature) of each completion token, in float64."""
    logits = reference_logits(spec, params, [*prompt, *completion]).astype(np.float64) / temperature
    logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= logits.max(-1, keepdims=True)
    before = np.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return logprobs[before, np.asarray(completion)]
