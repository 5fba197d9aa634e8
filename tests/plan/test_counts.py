"""FLOPs and bytes against brute force, and against XLA's count of a program without loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_spec import TINY

from burnish.models import decoder
from burnish.models.attention import visibility
from burnish.models.families import preset_config, spec_from_hf
from burnish.models.params import init_params, num_params
from burnish.models.spec import ExpertsSpec, LayerKind
from burnish.plan import counts

SPEC = dataclasses.replace(TINY, num_layers=1, d_model=64, head_dim=32, d_mlp=96, vocab_size=128, tied_head=False)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
def test_visible_pairs_are_those_that_attention_computes(window):
    P, C, G = 5, 4, 3
    branches = np.array([0] * P + [g for g in range(1, G + 1) for _ in range(C)])[None]
    positions = np.array([*range(P), *[P + t for _ in range(G) for t in range(C)]])[None]
    seen = visibility(jnp.ones_like(branches), jnp.asarray(branches), jnp.asarray(positions), window)
    assert counts.visible_pairs(P, C, G, window) == int(np.sum(seen))


def test_forward_flops_are_those_of_xla():
    B, T = 4, 64  # one layer, which the scan's only turn is; short rows compute all pairs
    params = init_params(SPEC, jax.random.key(0))
    ints = jnp.zeros((B, T), jnp.int32)

    def logits(params, tokens):
        hidden = decoder.forward(SPEC, params, tokens, jnp.arange(T)[None] + tokens, tokens + 1)
        return decoder.unembed(SPEC, params, hidden)

    cost = jax.jit(logits).lower(params, ints).compile().cost_analysis()
    attention = B * 4.0 * SPEC.num_heads * SPEC.head_dim * T * T
    ours = counts.forward_flops(SPEC, B * T, attention, B * T)
    # XLA counts norms, rope, softmax and masks too, which are small.
    assert ours < cost["flops"] < 1.1 * ours


def test_of_experts_only_the_active_ones_count():
    mixture = dataclasses.replace(SPEC, experts=ExpertsSpec(num_experts=8, num_active=2, d_expert=48))
    D, attention = SPEC.d_model, 64 * 32 * (4 + 2 + 2 + 4)
    assert counts.matrix_weights(SPEC) == attention + 3 * D * SPEC.d_mlp
    assert counts.matrix_weights(mixture) == attention + D * 8 + 2 * (3 * D * 48)


def test_many_tokens_read_all_experts_and_one_token_its_own():
    mixture = dataclasses.replace(SPEC, experts=ExpertsSpec(num_experts=8, num_active=2, d_expert=48))
    assert sum(counts.matrices_read(mixture, 1)) == pytest.approx(counts.matrix_weights(mixture))
    everything = counts.matrix_weights(dataclasses.replace(mixture, experts=ExpertsSpec(8, 8, 48)))
    assert sum(counts.matrices_read(mixture, 10_000)) == pytest.approx(everything)
    # Against drawing: 5 tokens, each with 2 of 8 experts.
    draws = np.random.default_rng(0).random((20_000, 5, 8)).argsort(axis=-1)[..., :2]
    hit = np.mean([len(np.unique(d)) for d in draws.reshape(20_000, 10)])
    dense = counts.matrix_weights(mixture) - 2 * 3 * 64 * 48
    assert counts.matrices_read(mixture, 5) == pytest.approx((dense, hit * 3 * 64 * 48), rel=1e-2)


def test_windows_bound_what_is_read_of_caches():
    two = dataclasses.replace(SPEC, num_layers=2, pattern=(LayerKind(window=16), LayerKind()))
    assert counts.cache_read(two, 100, 2) == (16 + 100) * 2 * 2 * 32 * 2


def test_llama_costs_two_flops_per_weight_and_token():
    spec = spec_from_hf(preset_config("llama3.1-8b"))
    per_token = counts.forward_flops(spec, 1, 0, 1)
    without_embeddings = num_params(spec) - spec.vocab_size * spec.d_model
    assert per_token == pytest.approx(2 * without_embeddings, rel=1e-3)
