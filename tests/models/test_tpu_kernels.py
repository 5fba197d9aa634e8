"""TPU kernels in interpret mode give what the plain functions give, forward and backward."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models import tpu
from burnish.models.attention import plain_attention, visibility
from burnish.models.scoring import Scoring


def packed_row(T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two prompts with completions of uneven lengths, then padding: segments, branches, positions (1, T)."""
    segments, branches, positions = [], [], []
    for segment, (prompt, completions) in enumerate([(70, (90, 33)), (20, (100, 41, 5))], start=1):
        segments += [segment] * (prompt + sum(completions))
        branches += [0] * prompt
        positions += list(range(prompt))
        for branch, length in enumerate(completions, start=1):
            branches += [branch] * length
            positions += list(range(prompt, prompt + length))
    pad = T - len(segments)
    return tuple(np.array([x + [0] * pad], np.int32) for x in (segments, branches, positions))  # type: ignore[return-value]


@pytest.mark.parametrize(("window", "softcap", "head_dim"), [(None, None, 64), (50, 20.0, 128)])
def test_splash_attention_is_plain_attention(window, softcap, head_dim):
    T, H, K = 512, 4, 2
    segments, branches, positions = packed_row(T)
    visible = visibility(jnp.array(segments), jnp.array(branches), jnp.array(positions), window)
    score = Scoring(0.3, softcap)
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.array(rng.normal(size=(1, T, heads, head_dim)), jnp.float32) for heads in (H, K, K, H))
    weight = jnp.where(jnp.array(segments)[..., None, None] != 0, weight, 0)  # nothing depends on padding

    def value(attend, q, k, v):
        out = attend(q, k, v)
        return jnp.sum(jnp.where(weight != 0, out * weight, 0)), out

    def both(attend, seen):
        return jax.jit(
            lambda seen: jax.value_and_grad(lambda *x: value(attend(seen), *x), argnums=(0, 1, 2), has_aux=True)(
                q, k, v
            )
        )(seen)

    plan = tpu.splash_plan(jnp.array(segments), jnp.array(branches), window)
    (_, out), grads = both(lambda plan: tpu.splash_attention(plan, score, window, interpret=True), plan)
    (_, expected), expected_grads = both(lambda visible: plain_attention(visible, score), visible)
    real = np.broadcast_to(segments[..., None, None] != 0, out.shape)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[real], expected[real], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("window", [None, 40, 300])
def test_blocks_of_splash_attention_are_those_with_a_visible_pair(window):
    T = 1152  # blocks of 128
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(3):
        segments, branches, positions = [], [], []
        for segment in range(1, 6):
            prompt = int(rng.integers(1, 150))
            lengths = rng.integers(1, rng.choice([20, 200]), int(rng.integers(1, 4))).tolist()
            for branch, (start, length) in enumerate([(0, prompt), *((prompt, n) for n in lengths)]):
                segments += [segment] * length
                branches += [branch] * length
                positions += range(start, start + length)
        rows.append([(x + [0] * T)[:T] for x in (segments, branches, positions)])
    segments, branches, positions = np.array(rows, np.int32).swapaxes(0, 1)
    plan = tpu.splash_plan(jnp.array(segments), jnp.array(branches), window)
    visible = np.array(visibility(*map(jnp.array, (segments, branches, positions)), window))
    visible |= (segments == 0)[:, :, None] & np.eye(T, dtype=bool)
    block = tpu.block_of(T)
    J = T // block
    assert J == 9
    np.testing.assert_array_equal(plan.blocks, visible.reshape(3, J, block, J, block).any(axis=(2, 4)))
    assert 0 < plan.blocks.sum() < 3 * J * (J + 1) / 2


@pytest.mark.parametrize("per_query", [False, True])
def test_cache_attention_is_softmax_over_what_is_visible(per_query):
    X, K, Q, N, S = 3, 2, 6, 64, 512
    rng = np.random.default_rng(1)
    q = rng.normal(size=(X, K, Q, N)).astype(np.float32)
    k = rng.normal(size=(X, K, N, S)).astype(np.float32)
    v = rng.normal(size=(X, K, S, N)).astype(np.float32)
    visible = rng.random((X, Q if per_query else 1, S)) < 0.3
    visible[0, :, 128:] = False  # blocks that nobody sees
    visible[1] = False  # a row that sees nothing
    part = tpu.cache_attention(q, k, v, jnp.array(visible), Scoring(0.2, None), interpret=True)
    scores = 0.2 * np.einsum("xkqn,xkns->xkqs", q.astype(np.float64), k)
    weights = np.where(visible[:, None], np.exp(scores), 0)
    for x in (0, 2):
        shares = weights[x] / weights[x].sum(-1, keepdims=True)
        expected = np.einsum("kqs,ksn->kqn", shares, v[x])
        np.testing.assert_allclose(part.mixed[x] / part.total[x][..., None], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(part.peak[x] + np.log(part.total[x]), np.log(weights[x].sum(-1)), rtol=1e-5)
    assert (np.array(part.total[1]) == 0).all()
    assert (np.array(part.mixed[1]) == 0).all()


def test_grouped_dot_is_ragged_dot():
    M, D, F, E = 200, 96, 160, 4
    rng = np.random.default_rng(2)
    rows, weights = rng.normal(size=(M, D)).astype(np.float32), rng.normal(size=(E, D, F)).astype(np.float32)
    sizes = jnp.array([50, 0, 77, 30], jnp.int32)  # 43 rows belong to no group

    def value(product, rows, weights):
        out = product(rows, weights)
        return jnp.sum(jnp.sin(out)), out

    def both(product):
        return jax.value_and_grad(lambda *x: value(product, *x), argnums=(0, 1), has_aux=True)(
            jnp.array(rows), jnp.array(weights)
        )

    (_, out), grads = both(lambda r, w: tpu.grouped_dot(r, w, sizes, interpret=True))
    (_, expected), expected_grads = both(lambda r, w: jax.lax.ragged_dot(r, w, sizes))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_kernels_compile_for_v6e():
    pytest.importorskip("libtpu", reason="libtpu is not installed (extra tpu)")
    script = Path(__file__).with_name("compile_for_tpu.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [int(line.rpartition(": ")[2].split()[0]) for line in done.stdout.splitlines()]
    assert kernels == [3, 3, 3, 3, 1, 1, 1, 2, 2]
    long_row = next(line for line in done.stdout.splitlines() if "long row" in line)
    assert int(long_row.split()[-4]) < 64, long_row  # MiB: nothing has T² elements
