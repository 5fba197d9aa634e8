"""Speed of conversions as a share of what `cp` takes for the same bytes, and the memory they need.

A synthetic Llama checkpoint in eight shards is converted to MaxText's layout (scanned) and back, in turn with
plain copies of the same files; each begins with its source in the page cache and ends when its bytes are on the
disk. Conversions run in processes of their own, whose peak resident memory is taken above what they had before
they began.

    python benchmarks/convert.py --gigabytes 4 --directory /tmp/convert --output convert.json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from common import machine_facts, measured, summary, write_json

from burnish.checkpoints.hf_rows import RowTensor, RowWriter
from burnish.checkpoints.maxtext_map import family_of, hf_tensors, leaves

SHARDS = 8
LAYER_PARAMS = 218_112_000  # of the shapes below
OUTER_PARAMS = 262_144_000

CHILD = """
import json, resource, sys, time
from rich.console import Console
from burnish.cli.main import COMMANDS
from burnish.checkpoints.convert_commands import convert
from burnish.config.overrides import load_config
from burnish.config.schema import ConvertConfig
config = load_config(ConvertConfig, sys.argv[1:], ("source", "destination"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, cpu = time.perf_counter(), time.process_time()
convert(config, Console(quiet=True))
seconds = time.perf_counter() - start
cpu = time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({
    "seconds": seconds,
    "cpu": cpu,
    "above_baseline_mb": (peak - before) * 1024 / 1e6,
    "peak_mb": peak * 1024 / 1e6,
}))
"""


def llama_config(num_layers: int) -> dict[str, Any]:
    """The width of Llama 3.1 8B with fewer layers and a vocabulary of 32,000."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def make_checkpoint(directory: Path, gigabytes: float) -> int:
    """A checkpoint of normal random weights; returns its bytes."""
    layers = max(1, round((gigabytes * 1e9 / 2 - OUTER_PARAMS) / LAYER_PARAMS))
    config = llama_config(layers)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    shapes = hf_tensors(leaves(family_of(config), scanned=True))
    tensors = [RowTensor(name, "BF16", shape) for name, shape in shapes.items()]
    total = sum(t.nbytes for t in tensors)
    writer = RowWriter(directory, tensors, -(-total // SHARDS) + 64_000_000)
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 24).astype(ml_dtypes.bfloat16)
    for number, tensor in enumerate(tensors):
        columns = int(np.prod(tensor.shape[1:], dtype=np.int64))
        step = max(1, block.size // columns // 2)
        for start in range(0, tensor.shape[0], step):
            count = min(step, tensor.shape[0] - start)
            offset = (number * 7919 + start) % (block.size - count * columns + 1)
            rows = block[offset : offset + count * columns].reshape(count, *tensor.shape[1:])
            writer.write(tensor.name, start, rows)
    writer.close()
    return total


def warm(directory: Path) -> None:
    """Read all files, so that a run finds them in the page cache whatever ran before it."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass


def synced_copy(source: Path, target: Path) -> dict[str, float]:
    """Wall and CPU seconds that cp and bringing the copy to the disk take."""
    warm(source)
    before = os.times()
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for file in target.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    seconds = time.perf_counter() - start
    after = os.times()
    cpu = sum(getattr(after, n) - getattr(before, n) for n in ("user", "system", "children_user", "children_system"))
    return {"seconds": seconds, "cpu": cpu}


def conversion(source: Path, target: Path, *options: str) -> dict[str, float]:
    """One conversion in a process of its own."""
    warm(source)
    args = [str(source), str(target), *options]
    done = subprocess.run([sys.executable, "-c", CHILD, *args], check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--directory", type=Path, required=True, help="made, and removed at the end")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    root = args.directory
    root.mkdir(parents=True)
    try:
        total = make_checkpoint(root / "hf", args.gigabytes)
        runs: dict[str, list[dict[str, float]]] = {"to_maxtext": [], "to_hf": [], "to_maxtext_unscanned": []}
        copies: list[dict[str, float]] = []
        children = os.times()
        with measured() as usage:
            for _ in range(args.repeats):
                copies.append(synced_copy(root / "hf", root / "copy"))
                shutil.rmtree(root / "copy")
                runs["to_maxtext"].append(conversion(root / "hf", root / "mt", "--to", "maxtext"))
                runs["to_hf"].append(conversion(root / "mt", root / "back", "--to", "hf"))
                for name in ("mt", "back"):
                    shutil.rmtree(root / name)
                unscanned = (
                    "--to",
                    "maxtext",
                    "scan_layers=false",
                    "checkpoint_storage_use_ocdbt=0",
                    "checkpoint_storage_use_zarr3=0",
                )
                runs["to_maxtext_unscanned"].append(conversion(root / "hf", root / "mt", *unscanned))
                shutil.rmtree(root / "mt")
        after = os.times()
        own = sum(getattr(after, n) - getattr(children, n) for n in ("children_user", "children_system"))
    finally:
        shutil.rmtree(root)
    copy = min(c["seconds"] for c in copies)
    result: dict[str, Any] = {
        "machine": machine_facts(),
        "bytes": total,
        "others_cores": max(0.0, usage.others_cores - own / usage.wall_s),
        "cp_gb_per_s": total / copy / 1e9,
        "cp_seconds": summary([c["seconds"] for c in copies]),
        "cp_cpu_s_per_gb": min(c["cpu"] for c in copies) / total * 1e9,
    }
    for name, each in runs.items():
        seconds = min(r["seconds"] for r in each)
        result[name] = {
            "gb_per_s": total / seconds / 1e9,
            "share_of_cp": copy / seconds,
            "cpu_s_per_gb": min(r["cpu"] for r in each) / total * 1e9,
            "above_baseline_mb": max(r["above_baseline_mb"] for r in each),
            "peak_mb": max(r["peak_mb"] for r in each),
        }
    print(json.dumps(result, indent=2))
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
