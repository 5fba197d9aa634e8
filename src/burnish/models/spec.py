"""What a model is, as data: every size and behaviour that the decoder needs and nothing else.

A ModelSpec is made from a Hugging Face config.json by a family (models/families/) and is the only description
of the architecture that the rest of the code sees. Layers of several kinds are a repeating pattern of
differences from the model's own fields; `ModelSpec.at` gives the description of one layer.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout.

    `kind` "llama3" is the frequency-dependent scaling of Llama 3.1, "linear" divides every position by
    `factor`, "yarn" is Peng et al. 2023 (arXiv:2309.00071). `rotated` is the part of the pairs that turn at all,
    the fastest first; the frequencies are those of the whole head width (Gemma 4's "proportional" rope).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    rotated: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: its range of pairs is rounded outwards to whole pairs
    magnitude: float = 1.0  # yarn: factor on cos and sin


@dataclass(frozen=True)
class ExpertsSpec:
    """Mixture of experts: every token goes to the A of E experts that the router finds most probable."""

    num_experts: int  # E
    num_active: int  # A
    d_expert: int  # mlp width of one expert
    normalise: bool = True  # the A probabilities are divided by their sum
    beside_mlp: bool = False
    """Gemma 4: experts are added to a dense MLP, each with norms of its own; the router reads the normalised
    residual stream and each expert has a scale."""


@dataclass(frozen=True)
class LayerKind:
    """In what one kind of layer differs from the model's own fields; None: in nothing."""

    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: RopeSpec | None = None
    window: int | None = None
    keys_are_values: bool | None = None
    dense: bool = False
    """A plain MLP although the model has experts."""


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
    attention_bias: bool = False  # biases on q, k and v
    output_bias: bool = False  # bias on o
    mlp_bias: bool = False  # biases on gate, up and down
    activation: Literal["silu", "gelu_tanh"] = "silu"

    window: int | None = None  # a query sees its own and the window - 1 positions before it; None: all
    query_scale: float | None = None  # of attention scores; None: 1/sqrt(N)
    attention_softcap: float | None = None  # scores are cap * tanh(scores / cap)
    final_softcap: float | None = None  # the same for logits
    qk_norm: bool = False  # RMS norm of each query and key head, with a scale
    v_norm: bool = False  # RMS norm of each value head, without
    keys_are_values: bool = False  # no v_proj: values are the keys before norm and rope

    norm_offset: float = 0.0  # norms scale by offset + weight
    norm_rounds_last: bool = False  # norms round to the compute dtype after the scale, not before it
    output_norms: bool = False  # norms also on what attention and MLP add to the residual stream
    embed_scale: float = 1.0
    layer_scalar: bool = False  # a layer's result is multiplied by a number that is loaded, never trained
    experts: ExpertsSpec | None = None

    pattern: tuple[LayerKind, ...] = (LayerKind(),)
    """Layer i is of kind pattern[i % len(pattern)]. The pattern need not divide L."""

    def at(self, layer: int) -> "ModelSpec":
        """The same model as if all its layers were like this one: no pattern."""
        return _resolved(self, self.pattern[layer % len(self.pattern)])


@lru_cache(maxsize=256)
def _resolved(spec: ModelSpec, kind: LayerKind) -> ModelSpec:
    own: dict[str, Any] = {
        name: getattr(kind, name)
        for name in ("num_kv_heads", "head_dim", "rope", "window", "keys_are_values")
        if getattr(kind, name) is not None
    }
    if kind.dense:
        own["experts"] = None
    return replace(spec, pattern=(LayerKind(),), **own)


def per_kind(spec: ModelSpec, key: Callable[[ModelSpec], Hashable], make: Callable[[ModelSpec], T]) -> list[T]:
    """make(kind) for each position of the pattern, made once for kinds of the same key."""
    kinds = [spec.at(i) for i in range(len(spec.pattern))]
    made = {key(kind): kind for kind in kinds}
    values = {k: make(kind) for k, kind in made.items()}
    return [values[key(kind)] for kind in kinds]


def shortest_pattern(kinds: list[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest tuple that, repeated and cut, gives the kinds of all layers."""
    for size in range(1, len(kinds)):
        if all(kind == kinds[i % size] for i, kind in enumerate(kinds)):
            return tuple(kinds[:size])
    return tuple(kinds)
