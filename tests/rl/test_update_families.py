"""The update on models with windows, soft caps, patterns and experts: packed rows against one completion at a time."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_rl

from burnish.models.spec import ExpertsSpec, LayerKind, RopeSpec
from burnish.rl.packing import pack
from burnish.rl.update import Updater

GEMMA = replace(
    tiny_rl.SPEC,
    num_layers=3,
    activation="gelu_tanh",
    attention_softcap=4.0,
    final_softcap=6.0,
    query_scale=0.3,
    qk_norm=True,
    norm_offset=1.0,
    norm_rounds_last=True,
    output_norms=True,
    embed_scale=5.0,
    pattern=(LayerKind(window=5, rope=RopeSpec(100.0)), LayerKind(num_kv_heads=1, head_dim=16, keys_are_values=True)),
)
EXPERTS = replace(tiny_rl.SPEC, experts=ExpertsSpec(num_experts=6, num_active=2, d_expert=16))


@pytest.mark.parametrize("spec", [GEMMA, EXPERTS], ids=["pattern", "experts"])
def test_any_packing_gives_the_logprobs_and_the_update_of_single_rows(spec):
    groups = tiny_rl.groups()
    params = tiny_rl.params(spec=spec)
    advantages = np.random.default_rng(0).normal(size=(4, 4))
    updater = Updater(spec, tiny_rl.update_options(temperature=0.9))
    metrics = []
    for max_tokens in (64, 512):
        packed = pack(groups, advantages, np.ones((4, 4), bool), max_tokens=max_tokens)
        found = {}
        for batch, lp in zip(packed.micro_batches, updater.logprobs(params, packed), strict=True):
            for s in set(batch.sequences[batch.trained].tolist()):
                mine = batch.trained & (batch.sequences == s)
                found[tuple(batch.targets[mine])] = np.asarray(lp)[mine]
        for group in groups:
            c = group.completions[0]
            alone = tiny_rl.row_logprobs(params, group.prompt.token_ids, c.token_ids, 0.9, spec)
            np.testing.assert_allclose(found[tuple(c.token_ids)], alone, atol=2e-5)
        _, step_metrics, _ = updater.step(updater.init(jax.tree.map(np.array, params)), packed)
        metrics.append({k: float(v) for k, v in step_metrics.items()})
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-4)
    if spec.experts is not None:  # prompts are read once or several times
        for name in ("experts/load_max", "experts/idle", "experts/router_entropy"):
            assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-5), name
        assert 1 < metrics[0]["experts/load_max"] <= 6 / 2
        assert 0 <= metrics[0]["experts/idle"] < 1
        assert 0 < metrics[0]["experts/router_entropy"] <= np.log(6)
