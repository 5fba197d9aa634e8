"""The Hugging Face hub: which repository a preset's weights are in, and uploading an export with a model card.

The card says what was trained, on what and with which figures, all read from the run that the export came
from. Nothing here prints or stores the token.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from etils import epath

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.run_dir import RunDirectory

HUB_IDS: dict[str, str] = {
    "gemma2-27b": "google/gemma-2-27b",
    "gemma2-2b": "google/gemma-2-2b",
    "gemma2-9b": "google/gemma-2-9b",
    "gemma3-12b": "google/gemma-3-12b-it",
    "gemma3-12b-it": "google/gemma-3-12b-it",
    "gemma3-1b": "google/gemma-3-1b-pt",
    "gemma3-1b-it": "google/gemma-3-1b-it",
    "gemma3-270m": "google/gemma-3-270m",
    "gemma3-270m-it": "google/gemma-3-270m-it",
    "gemma3-27b": "google/gemma-3-27b-it",
    "gemma3-27b-it": "google/gemma-3-27b-it",
    "gemma3-4b": "google/gemma-3-4b-it",
    "gemma3-4b-it": "google/gemma-3-4b-it",
    "gemma4-26b": "google/gemma-4-26b-a4b-it",
    "gemma4-26b-it": "google/gemma-4-26b-a4b-it",
    "gemma4-31b": "google/gemma-4-31b-it",
    "gemma4-31b-it": "google/gemma-4-31b-it",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama3-70b-Instruct": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3-8b-Instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama3.1-70b-Instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama3.1-8b-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama3.2-1b-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama3.2-3b-Instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.3-70b-Instruct": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-v0.3": "mistralai/Mistral-7B-v0.3",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-0.5b-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-1.5b-Instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "qwen2.5-14b-Instruct": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    "qwen2.5-32b-Instruct": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-3b-Instruct": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B",
    "qwen2.5-72b-Instruct": "Qwen/Qwen2.5-72B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-7b-Instruct": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "smollm2-1.7b-Instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-135m-Instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-360m-Instruct": "HuggingFaceTB/SmolLM2-360M-Instruct",
}
"""Where the weights of the presets are published."""


def hub_id(model_name: str) -> str:
    """The repository of a preset. Raises CheckpointError for a name without one."""
    if model_name not in HUB_IDS:
        raise CheckpointError(
            f"model_name={model_name}: no repository is known for it; give the checkpoint with hf_model_path="
        )
    return HUB_IDS[model_name]


def push(directory: Path, repository: str, token: str | None, private: bool, card: str) -> str:
    """Upload an exported directory with a model card; returns the address. The repository is made where it
    is missing. Raises CheckpointError saying what the hub refused."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=token)
    hint = "set hf_access_token= or the environment variable HF_TOKEN to a token that may write"
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            folder_path=directory,
            repo_id=repository,
            commit_message="Export from burnish",
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],  # of an earlier export in other shards
        )
        api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repository)
    except HFValidationError:
        raise CheckpointError(f"push_to_hub={repository} is not well formed; give owner/name") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        why = f"the hub refused it ({status}); {hint}" if status in (401, 403) else f"the hub answered {status}"
        raise CheckpointError(f"{directory} is exported, but was not uploaded to {repository}: {why}") from None
    except OSError as error:
        raise CheckpointError(
            f"{directory} is exported, but was not uploaded to {repository}: the hub cannot be reached "
            f"({type(error).__name__})"
        ) from None
    return str(address)


def run_of(checkpoint: epath.Path) -> RunDirectory | None:
    """The run that the training checkpoint `<run>/checkpoints/actor/<step>` belongs to; None where its config
    is not there."""
    path = checkpoint.parent.parent.parent
    if path.name in ("", ".."):
        return None
    run = RunDirectory(str(path.parent), path.name)
    return run if run.checkpoints == checkpoint.parent and run.config.exists() else None


def model_card(config: Mapping[str, Any], run: RunDirectory | None, step: str) -> str:
    """README.md of an export: what was trained, on what, with which figures. Without a run it says what is
    known from config.json."""
    options: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    if run is not None:
        options = yaml.safe_load(run.config.read_text()) or {}
        if run.summary.exists():
            summary = json.loads(run.summary.read_text())
    base = options.get("load_parameters_path")
    tags = ["burnish"] if run is None else ["burnish", "grpo"] if "rl" in options else ["burnish", "sft"]
    header: dict[str, Any] = {"library_name": "transformers", "tags": tags}
    if isinstance(base, str) and base.count("/") == 1 and not base.startswith((".", "/", "~")):
        header["base_model"] = base
    dataset = options.get("dataset_name")
    if isinstance(dataset, str) and "/" in dataset:
        header["datasets"] = [dataset]
    lines = ["---", yaml.safe_dump(header, sort_keys=False).strip(), "---", ""]
    kind = config.get("model_type", "language model")
    if run is None:
        lines += [f"# {kind}, converted with burnish", "", "Converted; not trained by this program."]
        return "\n".join(lines) + "\n"
    how = "post-trained with GRPO on verifiable rewards" if "rl" in options else "fine-tuned on answers"
    lines += [
        f"# {run.run_name}",
        "",
        f"A {kind} model, {how} by burnish.",
        "",
        "## Training",
        "",
        f"- started from: `{base}`",
        f"- data: `{dataset}`" + (f", split `{options['train_split']}`" if options.get("train_split") else ""),
        f"- checkpoint: step {step}",
    ]
    shown = (
        "num_batches",
        "batch_size",
        "learning_rate",
        "optimizer",
        "max_target_length",
        "decode_sampling_temperature",
    )
    lines += [f"- {name}: {options[name]}" for name in shown if name in options]
    lines += [f"- rl.{name}: {value}" for name, value in (options.get("rl") or {}).items() if value is not None]
    figures = list(_figures(summary))
    if figures:
        lines += ["", "## Figures", "", "| figure | value |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in figures]
    return "\n".join(lines) + "\n"


def _figures(summary: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Every number of a summary by its dotted name."""
    found = []
    for name, value in summary.items():
        if isinstance(value, Mapping):
            found += _figures(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((prefix + name, f"{value:.6g}" if isinstance(value, float) else str(value)))
    return found
