"""Trained tokens per second of the GRPO update at SmolLM2-135M's sizes, random weights, beta 0, AdamW in float32.

8 prompts of 128 tokens with 4 completions of 128 tokens each: 4,096 tokens are trained in one optimizer step. The
share of the machine's own matrix-product rate counts 6·N FLOP a trained token (N parameters; forward 2, backward 4),
so prompts, attention, softmax, padding and the optimizer are overhead. Every repeat is a whole step; the
matrix-product rate is measured again around each.

    python benchmarks/update.py [--json FILE] [--repeats 3] [--max-tokens 1280] [--remat auto]
"""

import argparse
import statistics
from dataclasses import asdict

import jax
import numpy as np
from common import machine_facts, matmul_rate, measured, peak_memory_gb, summary, write_json
from rollout import SMOLLM2_135M

from burnish.data.types import Prompt
from burnish.models.params import init_params, num_params
from burnish.models.spec import ModelSpec
from burnish.rl.losses import LossOptions
from burnish.rl.optimizer import OptimizerOptions
from burnish.rl.packing import pack
from burnish.rl.schedule import LearningRate
from burnish.rl.types import PackedStep
from burnish.rl.update import UpdateOptions, Updater
from burnish.rollout.types import Completion, Group, StopReason

PROMPTS, COMPLETIONS, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 4, 128, 128


def batch(spec: ModelSpec, max_tokens: int) -> PackedStep:
    """Random token ids in the benchmark's shape, advantages of both signs."""
    rng = np.random.default_rng(0)

    def completion() -> Completion:
        ids = rng.integers(0, spec.vocab_size, COMPLETION_TOKENS).astype(np.int32)
        logprobs = np.full(COMPLETION_TOKENS, -10.8, np.float32)
        return Completion(ids, logprobs, np.zeros_like(ids), StopReason.LENGTH, "", 0)

    groups = [
        Group(
            Prompt(i, "", "", "", tuple(rng.integers(0, spec.vocab_size, PROMPT_TOKENS).tolist())),
            tuple(completion() for _ in range(COMPLETIONS)),
        )
        for i in range(PROMPTS)
    ]
    advantages = np.tile(np.linspace(-1, 1, COMPLETIONS), (PROMPTS, 1))
    return pack(groups, advantages, np.ones_like(advantages, bool), max_tokens=max_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", metavar="FILE", help="write the result there as JSON")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps (default 3)")
    parser.add_argument("--max-tokens", type=int, default=1280, help="tokens of a micro-batch (default 1280)")
    parser.add_argument("--remat", default="minimal", help="remat_policy (default minimal)")
    args = parser.parse_args()

    spec = SMOLLM2_135M
    packed = batch(spec, args.max_tokens)
    options = UpdateOptions(
        loss=LossOptions(), optimizer=OptimizerOptions(LearningRate(3e-6, 0, 1000)), remat=args.remat
    )
    updater = Updater(spec, options)
    with measured() as first:
        state = updater.init(jax.jit(init_params, static_argnums=0)(spec, jax.random.key(0)))
        state, metrics, _ = updater.step(state, packed)
        jax.block_until_ready(state)
    print(f"first step with compilation: {first.wall_s:.1f} s")

    rates, usages = [matmul_rate()], []
    for _ in range(args.repeats):
        with measured() as usage:
            state, metrics, _ = updater.step(state, packed)
            jax.block_until_ready((state, metrics))
        usages.append(usage)
        rates.append(matmul_rate())
        print(f"step: {usage.wall_s:.2f} s, {usage.cpu_s:.2f} CPU-s, others {usage.others_cores:.1f} cores", flush=True)

    tokens = PROMPTS * COMPLETIONS * COMPLETION_TOKENS
    gflop = 6 * num_params(spec) / 1e9
    wall = summary([tokens / u.wall_s for u in usages])
    cpu = summary([tokens / u.cpu_s for u in usages])
    rate = statistics.median(r.gflops for r in rates)
    rate_cpu = statistics.median(r.gflops_per_cpu_s for r in rates)
    result = {
        "benchmark": "update",
        "machine": machine_facts(),
        "trained_tokens": tokens,
        "row_tokens": packed.row_tokens,
        "padded_tokens": packed.padded_tokens,
        "micro_batches": len(packed.micro_batches),
        "remat": args.remat,
        "gflop_per_token": gflop,
        "first_step_s": first.wall_s,
        "steps": [asdict(u) for u in usages],
        "trained_tokens_per_s": wall,
        "trained_tokens_per_cpu_s": cpu,
        "matmul": [asdict(r) for r in rates],
        "share_of_matmul_rate": wall["median"] * gflop / rate,
        "share_of_matmul_rate_cpu": cpu["median"] * gflop / rate_cpu,
        "peak_memory_gb": peak_memory_gb(),
        "compilations": updater.num_compilations,
    }
    share, share_cpu = wall["median"] * gflop / rate, cpu["median"] * gflop / rate_cpu
    print(
        f"{wall['median']:.0f} trained tokens/s = {100 * share:.0f} % of {rate:.0f} GFLOP/s; "
        f"{cpu['median']:.0f} per CPU-second = {100 * share_cpu:.0f} % of {rate_cpu:.0f} GFLOP; "
        f"peak memory {peak_memory_gb():.1f} GB"
    )
    if args.json:
        write_json(args.json, result)


if __name__ == "__main__":
    main()
