"""Tokens per second of a generation engine, as a share of this machine's own matrix-product rate.

Default work: SmolLM2-135M's sizes with random weights, 8 prompts of 128 tokens × 4 completions of exactly 128 new
tokens, float32, temperature 0.8, top-k 50, top-p 0.95. 2·N floating-point operations are counted per sampled token;
prefill, attention and sampling are part of the time and not of the count. The matrix-product rate is measured anew
before every repeat, so that both feel the same machine. CPU time includes that of vLLM's process.

    python benchmarks/rollout.py [--model HF_DIRECTORY] [--json FILE] [--engine vllm --vllm-python PYTHON]
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import machine_facts, matmul_rate, measured, peak_memory_gb, summary, write_json

import burnish
from burnish.data.types import Prompt
from burnish.models.params import Params, init_params, num_params
from burnish.models.spec import ModelSpec, RopeSpec
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import RolloutEngine, SamplingParams
from burnish.rollout.vllm.engine import VllmEngine, VllmOptions

SMOLLM2_135M = ModelSpec(
    family="llama",
    num_layers=30,
    d_model=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    d_mlp=1536,
    vocab_size=49152,
    rms_norm_eps=1e-5,
    tied_head=True,
    max_positions=8192,
    rope=RopeSpec(theta=100_000.0),
)


def load_model(path: str | None) -> tuple[ModelSpec, Params]:
    if path is None:
        return SMOLLM2_135M, init_params(SMOLLM2_135M, jax.random.key(0))
    from burnish.checkpoints.hf_import import load_params

    return load_params(path)


def make_engine(args: argparse.Namespace, spec: ModelSpec, scratch: Path) -> tuple[RolloutEngine, list[int]]:
    """The engine, and the numbers of the processes that work for it. `scratch` is an empty directory."""
    sizes = {
        "max_slots": args.max_slots or args.prompts * args.completions,
        "max_prompt_tokens": args.prompt_tokens,
        "max_total_tokens": args.prompt_tokens + args.new_tokens,
        "dtype": jnp.dtype(args.dtype),
    }
    if args.engine == "builtin":
        return BuiltinEngine(spec, lambda ids: "", **sizes), []
    directory = Path(args.model) if args.model else smollm2_without_weights(scratch)
    options = VllmOptions(python=args.vllm_python, restarts=0)
    engine = VllmEngine(spec, directory, lambda ids: "", options, **sizes)
    return engine, [engine.pid] if engine.pid else []


def smollm2_without_weights(scratch: Path) -> Path:
    """What vLLM wants to see of SMOLLM2_135M: its config, and a tokenizer (any: nothing is decoded)."""
    spec = SMOLLM2_135M
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.d_model,
        "intermediate_size": spec.d_mlp,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": 100_000.0,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_head,
    }
    (scratch / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(burnish.__file__).parent / "assets" / "tiny" / name, scratch)
    return scratch


def random_prompts(num: int, length: int, vocab_size: int, repeat: int) -> list[Prompt]:
    rng = np.random.default_rng(repeat)
    return [Prompt(i, "", "", "", tuple(rng.integers(0, vocab_size, length).tolist())) for i in range(num)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face directory; default: random weights of SmolLM2-135M's sizes")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=4, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128, help="per completion, exactly")
    parser.add_argument("--max-slots", type=int, help="completions side by side; default: all")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default="builtin", choices=["builtin", "vllm"])
    parser.add_argument("--vllm-python", help="python of the environment that vLLM is installed in")
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args()
    with ExitStack() as stack:
        run(args, stack)


def run(args: argparse.Namespace, stack: ExitStack) -> None:
    spec, params = load_model(args.model)
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    engine, pids = make_engine(args, spec, scratch)
    if isinstance(engine, VllmEngine):
        stack.callback(engine.close)
    sampling = SamplingParams(
        max_total_tokens=args.prompt_tokens + args.new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        ignore_stop=True,
    )

    def generate(repeat: int) -> int:
        prompts = random_prompts(args.prompts, args.prompt_tokens, spec.vocab_size, repeat)
        G = args.completions
        seeds = [[(repeat * args.prompts + p) * G + g for g in range(G)] for p in range(args.prompts)]
        groups = engine.generate(prompts, seeds, sampling)
        return sum(len(c.token_ids) for g in groups for c in g.completions)

    engine.load_weights(params, version=0)  # compiles
    with measured(*pids) as load:
        engine.load_weights(params, version=0)
    start = time.perf_counter()
    generate(0)  # compiles
    first_s = time.perf_counter() - start
    compilations = engine.num_compilations

    gflop_per_token = 2 * num_params(spec) / 1e9
    runs: list[dict[str, Any]] = []
    for repeat in range(1, args.repeats + 1):
        rate = matmul_rate()
        with measured(*pids) as usage:
            tokens = generate(repeat)
        tok_s, tok_cpu_s = tokens / usage.wall_s, tokens / usage.cpu_s
        runs.append(
            {
                "tokens": tokens,
                "usage": usage,
                "matmul_rate": rate,
                "tokens_per_s": tok_s,
                "tokens_per_cpu_s": tok_cpu_s,
                "share_of_matmul": tok_s * gflop_per_token / rate.gflops,
                "share_of_matmul_per_cpu_s": tok_cpu_s * gflop_per_token / rate.gflops_per_cpu_s,
            }
        )
        print(
            f"repeat {repeat}: {tok_s:6.1f} tok/s  {tok_cpu_s:6.1f} tok/CPU-s  matmul {rate.gflops:5.1f} GFLOP/s  "
            f"share {runs[-1]['share_of_matmul']:.0%} wall, {runs[-1]['share_of_matmul_per_cpu_s']:.0%} CPU  "
            f"(others busy: {usage.others_cores:.2f} cores)",
            flush=True,
        )
    medians = {
        name: summary([run[name] for run in runs])
        for name in ("tokens_per_s", "tokens_per_cpu_s", "share_of_matmul", "share_of_matmul_per_cpu_s")
    }
    wall = statistics.median(run["usage"].wall_s for run in runs)
    result = {
        "machine": machine_facts(),
        "work": vars(args),
        "parameters": num_params(spec),
        **medians,
        "compile_s": first_s - wall,
        "compilations": compilations,
        "compilations_after_warm_up": engine.num_compilations - compilations,
        "load_weights": load,
        "peak_memory_gb": peak_memory_gb(*pids),
        "runs": runs,
    }
    print(
        f"median: {medians['tokens_per_s']['median']:.1f} tok/s, "
        f"{medians['tokens_per_cpu_s']['median']:.1f} tok/CPU-s, "
        f"{medians['share_of_matmul']['median']:.0%} of this machine's float32 matrix-product rate\n"
        f"compile {result['compile_s']:.1f} s ({compilations} compilations, "
        f"{result['compilations_after_warm_up']} after warm-up), load_weights {load.wall_s:.2f} s, "
        f"peak memory {result['peak_memory_gb']:.2f} GB"
    )
    if args.json:
        write_json(args.json, result)


if __name__ == "__main__":
    main()
