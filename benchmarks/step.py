"""Seconds of a whole GRPO step by phase: sampling, rewards, update, weights to the sampler.

Fixed lengths: 8 prompts of 128 random tokens × 4 completions of exactly 128 tokens, SmolLM2-135M's sizes. Real lengths
(--model and --gsm8k): 8 prompts of GSM8K × 4 completions that end with a stop token or after 256. Advantages are drawn
at random so that every completion is trained, as none is left out for having earned what its group earned.

    python benchmarks/step.py [--json FILE]
    python benchmarks/step.py --model smollm2 --gsm8k gsm8k/test.jsonl [--json FILE]
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import machine_facts, matmul_rate, measured, peak_memory_gb, write_json
from rollout import load_model, random_prompts

from burnish.data.pipeline import PromptPipeline
from burnish.data.sources import DataOptions, load_examples
from burnish.data.templates import PromptTemplate
from burnish.data.tokenizer import load_tokenizer
from burnish.data.types import Prompt
from burnish.rewards.stack import RewardOptions, RewardStack
from burnish.rl.evaluate import score_groups
from burnish.rl.losses import LossOptions
from burnish.rl.optimizer import OptimizerOptions
from burnish.rl.packing import pack
from burnish.rl.schedule import LearningRate
from burnish.rl.update import UpdateOptions, Updater
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import SamplingParams

PROMPTS, COMPLETIONS = 8, 4
PHASES = ("sampling", "rewards", "update", "weights")


def gsm8k_batches(model: str, file: str, steps: int) -> tuple[list[list[Prompt]], Any]:
    tokenizer = load_tokenizer(model)
    examples = load_examples(DataOptions(hf_eval_files=[file]), "eval")
    pipeline = PromptPipeline(examples, PromptTemplate.load("gsm8k_rl.json"), tokenizer, 256, PROMPTS, seed=0)
    return [next(pipeline) for _ in range(steps)], tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face directory; default: random weights of SmolLM2-135M's sizes")
    parser.add_argument("--gsm8k", metavar="FILE", help="JSONL file of GSM8K: real prompts and lengths")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps, after one or two that compile")
    parser.add_argument("--remat", default="minimal", choices=["none", "minimal", "full"])
    parser.add_argument("--train-row-tokens", type=int, default=2048, help="most tokens of a training row")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    args = parser.parse_args()
    if args.gsm8k and not args.model:
        parser.error("--gsm8k needs --model: real lengths come from a real model")

    spec, params = load_model(args.model)
    warm_up = 2 if args.gsm8k else 1
    steps = warm_up + args.repeats
    batches: Sequence[list[Prompt]]
    if args.gsm8k:
        batches, tokenizer = gsm8k_batches(args.model, args.gsm8k, steps)
        decode, stops, most_prompt, most_new = tokenizer.decode, tokenizer.stop_token_ids, 256, 256
    else:
        batches = [random_prompts(PROMPTS, 128, spec.vocab_size, i) for i in range(steps)]
        decode, stops, most_prompt, most_new = (lambda ids: ""), (), 128, 128
    engine = BuiltinEngine(
        spec,
        decode,
        max_slots=PROMPTS * COMPLETIONS,
        max_prompt_tokens=most_prompt,
        max_total_tokens=most_prompt + most_new,
        dtype=jnp.float32,
    )
    optimizer = OptimizerOptions(LearningRate(1e-6, 0, 1000))
    updater = Updater(spec, UpdateOptions(LossOptions(), optimizer, temperature=0.8, remat=args.remat))
    state = updater.init(jax.tree.map(lambda a: jax.device_put(a, may_alias=False), params))
    engine.load_weights(state.params, 0)
    advantages = np.random.default_rng(0).normal(size=(PROMPTS, COMPLETIONS))
    rows = []
    with RewardStack(RewardOptions()) as stack:
        for step, prompts in enumerate(batches, start=1):
            # The batch shares one limit, set by its longest prompt, so that none is cut short.
            longest = max(len(p.token_ids) for p in prompts)
            sampling = SamplingParams(
                max_total_tokens=min(longest + most_new, most_prompt + most_new),
                temperature=0.8,
                top_k=50,
                top_p=0.95,
                stop_token_ids=stops,
            )
            seeds = [[1000 * step + COMPLETIONS * i + j for j in range(COMPLETIONS)] for i in range(PROMPTS)]
            rate = matmul_rate().gflops
            usages = []
            with measured() as usage:
                groups = engine.generate(prompts, seeds, sampling)
            usages.append(usage)
            with measured() as usage:
                score_groups(stack, groups)
            usages.append(usage)
            with measured() as usage:
                packed = pack(groups, advantages, np.ones_like(advantages, bool), max_tokens=args.train_row_tokens)
                state, metrics, _ = updater.step(state, packed)
                jax.block_until_ready((state, metrics))
            usages.append(usage)
            with measured() as usage:
                engine.load_weights(state.params, step)
            usages.append(usage)
            tokens = sum(len(c.token_ids) for g in groups for c in g.completions)
            rows.append(
                {
                    "measured": step > warm_up,
                    "tokens": tokens,
                    "matmul_gflops": rate,
                    **{f"{name}_s": u.wall_s for name, u in zip(PHASES, usages, strict=True)},
                    "step_s": sum(u.wall_s for u in usages),
                    "step_cpu_s": sum(u.cpu_s for u in usages),
                    "others_cores": max(u.others_cores for u in usages),
                    "logprob_difference": float(metrics["logprob_difference_mean"]),
                }
            )
            print(
                f"step {step}{'' if step > warm_up else ' (compiles)'}: {tokens} tokens, "
                + ", ".join(f"{name} {u.wall_s:.2f} s" for name, u in zip(PHASES, usages, strict=True))
                + f", |Δlogp| {rows[-1]['logprob_difference']:.1e}",
                flush=True,
            )
    counted = [row for row in rows if row["measured"]]
    median = {key: statistics.median(row[key] for row in counted) for key in counted[0] if key != "measured"}
    result = {
        "benchmark": "step",
        "machine": machine_facts(),
        "work": vars(args),
        "median": median,
        "steps": rows,
        "peak_memory_gb": peak_memory_gb(),
        "compilations": engine.num_compilations + updater.num_compilations,
    }
    print(
        f"median: {median['step_s']:.1f} s a step ({median['tokens'] / median['step_s']:.0f} tokens/s whole), "
        + ", ".join(f"{name} {median[f'{name}_s']:.2f} s" for name in PHASES)
        + f"; {median['step_cpu_s']:.1f} CPU-s, peak memory {result['peak_memory_gb']:.1f} GB"
    )
    if args.json:
        write_json(args.json, result)


if __name__ == "__main__":
    main()
