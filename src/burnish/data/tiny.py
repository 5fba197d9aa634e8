"""The embedded model's architecture and tokenizer, written as a Hugging Face directory.

The tokenizer is byte-level BPE without merges: a word of the built-in data set (or its templates), a whole
number below 100 or a tag is one token, and any other text falls back to its bytes, so everything encodes and
decodes exactly. The weights are made by `burnish sft recipes/tiny-model.yaml`; this module makes everything
beside them. The model is a demonstration and a test fixture: it knows no English beyond
burnish.data.arithmetic.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from burnish.data import arithmetic
from burnish.data.templates import PromptTemplate

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

# In order: a tag, a spaced operator, a word with the space before it, one or two digits, a run of line breaks
# or blanks, anything else. Numbers never carry their space, so that 12 is the same token in " 12", "12 +" and
# ">12<".
_PRETOKENS = r" ?</?[a-z]+>| [-+*/=] | ?\p{L}+|\d{1,2}|\n+| +|[^\s\p{L}\d]|\s"

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "float32",
}


def write_tiny_base(directory: str | Path) -> Path:
    """Write config.json, generation_config.json and the tokenizer's files (no weights) into `directory`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    pad, begin, end = (SPECIAL_TOKENS.index(t) for t in ("<|pad|>", "<|begin|>", "<|end|>"))
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", {**CONFIG, "vocab_size": tokenizer.get_vocab_size(), **ids})
    _write_json(directory / "generation_config.json", {**ids, "eos_token_id": [end]})
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return directory


def build_tokenizer() -> Tokenizer:
    """The tokenizer: special tokens, the 256 bytes, then the words in the order of the alphabet."""
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRETOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces = {piece for text in _corpus() for piece, _ in pre_tokenizer.pre_tokenize_str(text)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *sorted(pieces - set(alphabet))]
    # ignore_merges: a piece that is in the vocabulary is one token; any other is spelled in bytes.
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer


def _corpus() -> list[str]:
    """Text that holds every piece that is to be a token of its own."""
    wordings = [w for shape in arithmetic.SHAPES for w in shape.wordings]
    fields = {"a": 1, "b": 1, "c": 1, "d": 1}
    texts = []
    for name, things in zip(arithmetic.NAMES, arithmetic.OBJECTS, strict=True):
        for packs in arithmetic.CONTAINERS:
            # `other` begins sentences and follows blanks in the wordings, as `name` does.
            texts += [w.format(name=name, other=name, things=things, packs=packs, **fields) for w in wordings]
    texts += [f"{n}" for n in range(100)]
    texts += [f"{tag} {tag}" for tag in arithmetic.TAGS]
    texts += [
        "First 1 + 1 = 2. Then 1 - 1 = 1. Then 1 * 1 = 1. Then 1 / 1 = 1. The answer is 1.",
        "\n",
        "\n\n",
    ]
    texts.append(PromptTemplate.load("gsm8k_rl.json").render("What?"))
    return texts


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(write_tiny_base(sys.argv[1]))
