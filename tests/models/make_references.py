"""Makes the reference arrays of tests/references/ with transformers and torch, which burnish itself never
needs.

    python tests/models/make_references.py [SmolLM2-135M-Instruct directory [Gemma 3 270M directory]]

Needs torch and transformers. With the directories, the references on real weights are made too.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from family_variants import ONE_OF_EACH, family_config, family_tensors, gradient_sketch, trained_mask
from family_variants import VARIANTS as FAMILY_VARIANTS
from llama_variants import VARIANTS, probe_tokens, random_tensors, variant_config, write_checkpoint

REFERENCES = Path(__file__).parents[1] / "references"

TEXTS = (
    "The quick brown fox jumps over the lazy dog. Then it",
    "Question: Tom has 12 apples and buys 30 more. How many apples does he have?\nAnswer:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
GEMMA3_TEXTS = (*TEXTS, " ".join(f"{n} plus {n} is {2 * n}." for n in range(60)))
"""The last one is longer than the window of 512."""


def transformers_logits(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits (B, T, V) float32 of a checkpoint directory by transformers, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    loose = info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]
    if loose:
        raise ValueError(f"{directory}: transformers does not take the checkpoint as it is: {info}")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens).long()).logits.float().numpy()


def variant_logits(name: str) -> np.ndarray:
    """transformers' logits (48, V) of one tiny random variant on its probe."""
    config = variant_config(name)
    with tempfile.TemporaryDirectory() as tmp:
        write_checkpoint(Path(tmp), config, random_tensors(config))
        return transformers_logits(Path(tmp), probe_tokens(config))[0]


def family_logits(name: str) -> np.ndarray:
    """transformers' logits (48, V) of one tiny variant of another family on its probe."""
    config = family_config(name)
    with tempfile.TemporaryDirectory() as tmp:
        write_checkpoint(Path(tmp), config, family_tensors(config))
        return transformers_logits(Path(tmp), probe_tokens(config))[0]


def family_gradients(name: str) -> dict[str, np.ndarray]:
    """Gradients, by tensor name of the checkpoint, of the masked log-likelihood of the probe; torch autograd."""
    import torch
    from transformers import AutoModelForCausalLM

    config = family_config(name)
    tensors = family_tensors(config, alike_experts=False)  # whose gradients would depend on the order of ties
    tokens = probe_tokens(config)
    with tempfile.TemporaryDirectory() as tmp:
        write_checkpoint(Path(tmp), config, tensors)
        model = AutoModelForCausalLM.from_pretrained(tmp, dtype=torch.float32, attn_implementation="eager")
        ids = torch.from_numpy(tokens).long()
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
        chosen = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        (chosen * torch.from_numpy(trained_mask(tokens.shape[1]))).sum().backward()
        grads = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    return _as_in_the_file(config, tensors, grads)


def _as_in_the_file(config, tensors, grads):
    """transformers 5 fuses the experts of Qwen and Mixtral when it loads them; here they are apart again."""
    arrays = {}
    for name in tensors:
        parts = name.replace("block_sparse_moe", "mlp").split(".experts.")
        if name in grads:
            arrays[name] = grads[name]
        elif len(parts) == 2 and parts[1][0].isdigit():
            expert, kind = int(parts[1].split(".")[0]), parts[1].split(".")[1]
            if kind in ("down_proj", "w2"):
                arrays[name] = grads[f"{parts[0]}.experts.down_proj"][expert]
            else:
                half = 0 if kind in ("gate_proj", "w1") else 1
                fused = grads[f"{parts[0]}.experts.gate_up_proj"][expert]
                arrays[name] = np.split(fused, 2)[half]
        elif name.replace("block_sparse_moe", "mlp") in grads:
            arrays[name] = grads[name.replace("block_sparse_moe", "mlp")]
        else:
            assert name.endswith("layer_scalar"), f"no gradient for {name}"  # a buffer: never trained
    return arrays


def real_references(directory: Path, texts: tuple[str, ...]) -> dict[str, np.ndarray]:
    """For each text: its ids, and at every position the ten highest logits and the log-sum-exp of all."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    arrays = {}
    for i, text in enumerate(texts):
        ids = np.array(tokenizer(text)["input_ids"], np.int32)
        logits = transformers_logits(directory, ids[None])[0]
        top = np.argpartition(-logits, 10, axis=-1)[:, :10]
        top = np.take_along_axis(top, np.argsort(-np.take_along_axis(logits, top, -1), axis=-1), -1)
        highest = logits.max(-1)
        arrays[f"ids_{i}"] = ids
        arrays[f"top_ids_{i}"] = top.astype(np.int32)
        arrays[f"top_logits_{i}"] = np.take_along_axis(logits, top, -1)
        arrays[f"logsumexp_{i}"] = highest + np.log(np.exp(logits - highest[:, None]).sum(-1))
    return arrays


if __name__ == "__main__":
    REFERENCES.mkdir(exist_ok=True)
    np.savez_compressed(REFERENCES / "llama_variants.npz", **{name: variant_logits(name) for name in VARIANTS})
    np.savez_compressed(REFERENCES / "family_variants.npz", **{name: family_logits(name) for name in FAMILY_VARIANTS})
    np.savez_compressed(
        REFERENCES / "family_gradients.npz",
        **{name: gradient_sketch(family_gradients(name)) for name in ONE_OF_EACH},
    )
    if len(sys.argv) > 1:
        np.savez_compressed(REFERENCES / "smollm2_135m.npz", **real_references(Path(sys.argv[1]), TEXTS))
    if len(sys.argv) > 2:
        np.savez_compressed(REFERENCES / "gemma3_270m.npz", **real_references(Path(sys.argv[2]), GEMMA3_TEXTS))
