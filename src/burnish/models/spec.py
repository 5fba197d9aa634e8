"""What a model is, as data: every size and behaviour that the decoder needs and nothing else.

A ModelSpec is made from a Hugging Face config.json by a family (models/families/) and is the only description
of the architecture that the rest of the code sees.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout.

    `kind` "llama3" is the frequency-dependent scaling of Llama 3.1, "linear" divides every position by
    `factor`.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """Sizes use the project's alphabet: L layers, D width, H query heads, K kv heads, N head width, F mlp,
    V vocabulary.
    """

    family: str
    num_layers: int  # L
    d_model: int  # D
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # N
    d_mlp: int  # F
    vocab_size: int  # V
    rms_norm_eps: float
    tied_head: bool
    max_positions: int
    rope: RopeSpec = RopeSpec()
    attention_bias: bool = False  # biases on q, k, v and o
    mlp_bias: bool = False  # biases on gate, up and down
