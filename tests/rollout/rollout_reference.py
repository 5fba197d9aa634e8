"""A tiny random model, and reference computations that know nothing of the engine: brute force in float64 for
sampling, the training forward pass for logprobs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tiny_spec

from burnish.data.types import Prompt
from burnish.models import decoder
from burnish.models.params import Params, init_params
from burnish.models.spec import ModelSpec
from burnish.rollout.engine import BuiltinEngine

VOCAB = 80
MAX_TOTAL = 200

TINY = replace(tiny_spec.TINY, vocab_size=VOCAB, max_positions=256)


def random_params(spec: ModelSpec, seed: int) -> Params:
    """std 0.3 rather than 0.02, so that logits differ enough for mistakes to show."""
    return init_params(spec, jax.random.key(seed), std=0.3)


def decode_text(ids: list[int]) -> str:
    """Token i is the letter i % 26."""
    return "".join(chr(97 + i % 26) for i in ids)


def make_engine(
    params: Params, spec: ModelSpec = TINY, *, max_slots: int = 8, dtype: str = "float32", version: int = 0
) -> BuiltinEngine:
    engine = BuiltinEngine(
        spec, decode_text, max_slots=max_slots, max_prompt_tokens=64, max_total_tokens=MAX_TOTAL, dtype=dtype
    )
    engine.load_weights(params, version=version)
    return engine


def make_prompt(length: int, seed: int = 0) -> Prompt:
    ids = np.random.default_rng([length, seed]).integers(1, VOCAB, length)
    return Prompt(index=seed, question="", answer="", text="", token_ids=tuple(ids.tolist()))


@partial(jax.jit, static_argnums=0)
def _forward_logits(spec: ModelSpec, params: Params, ids: jax.Array, length: jax.Array) -> jax.Array:
    positions = jnp.arange(ids.shape[1])[None]
    hidden = decoder.forward(spec, params, ids, positions, (positions < length).astype(jnp.int32))
    return decoder.unembed(spec, params, hidden)[0]


def reference_logits(params: Params, tokens: Sequence[int], spec: ModelSpec = TINY) -> np.ndarray:
    """Logits (T, V) of one sequence by the training forward pass: no cache, no batch. float64."""
    ids = np.zeros((1, MAX_TOTAL), np.int32)
    ids[0, : len(tokens)] = tokens
    logits = _forward_logits(spec, params, ids, np.int32(len(tokens)))
    return np.asarray(logits, np.float64)[: len(tokens)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def reference_logprobs(
    params: Params, prompt: Prompt, completion: np.ndarray, temperature: float, spec: ModelSpec = TINY
) -> np.ndarray:
    """log softmax(logits / temperature) of each completion token."""
    logits = reference_logits(params, [*prompt.token_ids, *completion.tolist()], spec)
    before = np.arange(len(prompt.token_ids) - 1, len(prompt.token_ids) + len(completion) - 1)
    return log_softmax(logits / temperature)[before, completion]


def cut_probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities (V,) after temperature, top-k, top-p among what is left, min-p; as transformers cuts."""
    logits = logits.astype(np.float64)
    if temperature == 0:
        temperature, top_k = 1.0, 1
    weights = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept = order[:top_k] if top_k else order
    mass = sum(weights[i] for i in kept)
    nucleus, running = [], 0.0
    for i in kept:
        if nucleus and running >= top_p * mass:
            break
        nucleus.append(i)
        running += weights[i]
    nucleus = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    result = np.zeros(len(logits))
    result[nucleus] = weights[nucleus]
    return result / result.sum()
