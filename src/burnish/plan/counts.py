"""How much a model computes and holds: FLOPs and bytes counted from its description, not from a compiled program.

A matrix product of (m, k) with (k, n) is 2·m·k·n FLOPs, as is usual; norms, rope, softmax and sampling are left out.
Of experts only those that a token goes to are counted. Attention is counted by visible pairs of query and key, so
that packed rows, shared prompts and windows cost what they must, whatever a kernel does beyond it.
"""

from burnish.models.params import layer_infos
from burnish.models.spec import ModelSpec

_EXPERT_WEIGHTS = ("expert_gate_up_proj", "expert_down_proj")


def _matrices(kind: ModelSpec) -> tuple[int, int]:
    """Weights of one layer that are multiplied with activations: dense ones, and those of all its experts."""
    infos = layer_infos(kind)
    dense = sum(i.size for name, i in infos.items() if name.endswith("_proj") and name not in _EXPERT_WEIGHTS)
    if "router" in infos:
        dense += infos["router"].size
    return dense, sum(infos[name].size for name in _EXPERT_WEIGHTS if name in infos)


def matrix_weights(spec: ModelSpec) -> float:
    """Weights that one token is multiplied with in all layers, without the vocabulary projection."""
    total = 0.0
    for i in range(spec.num_layers):
        kind = spec.at(i)
        dense, experts = _matrices(kind)
        total += dense + (experts * kind.experts.num_active / kind.experts.num_experts if kind.experts else 0)
    return total


def matrices_read(spec: ModelSpec, tokens: float) -> tuple[float, float]:
    """(dense weights, experts' weights) that a step over `tokens` tokens has to read in all layers: of experts, those
    that some token goes to if the router spreads tokens evenly, E·(1 - (1 - A/E)^tokens) of E."""
    dense = experts = 0.0
    for i in range(spec.num_layers):
        kind = spec.at(i)
        of_layer, of_experts = _matrices(kind)
        dense += of_layer
        if kind.experts:
            experts += of_experts * (1 - (1 - kind.experts.num_active / kind.experts.num_experts) ** tokens)
    return dense, experts


def visible_pairs(prompt: int, completion: int, completions: int, window: int | None = None) -> int:
    """Pairs of query and key in a prompt with `completions` completions, each seeing the prompt and itself. With a
    window a query sees its own and the window - 1 positions before it."""
    if window is None:
        shared = prompt * (prompt + 1) // 2
        own = completion * prompt + completion * (completion + 1) // 2
        return shared + completions * own
    shared = _windowed(0, prompt, window)
    return shared + completions * _windowed(prompt, prompt + completion, window)


def _windowed(start: int, end: int, window: int) -> int:
    """Σ min(t + 1, window) over positions t of [start, end)."""
    full_from = max(start, min(end, window - 1))
    rising = sum(range(start + 1, full_from + 1))
    return rising + (end - full_from) * window


def attention_flops(spec: ModelSpec, prompt: int, completion: int, completions: int) -> float:
    """FLOPs of scores and mixed values of all layers for one prompt with its completions."""
    pairs: dict[int | None, int] = {}
    total = 0.0
    for i in range(spec.num_layers):
        kind = spec.at(i)
        if kind.window not in pairs:
            pairs[kind.window] = visible_pairs(prompt, completion, completions, kind.window)
        total += 4.0 * kind.num_heads * kind.head_dim * pairs[kind.window]
    return total


def forward_flops(spec: ModelSpec, tokens: float, attention: float, projected: float) -> float:
    """FLOPs of one forward pass over `tokens` tokens whose attention costs `attention` FLOPs, `projected` of them to
    the vocabulary."""
    return 2.0 * matrix_weights(spec) * tokens + attention + 2.0 * spec.vocab_size * spec.d_model * projected


def cache_read(spec: ModelSpec, context: float, itemsize: int) -> float:
    """Bytes of keys and values that one query with `context` tokens before it needs, windows heeded."""
    total = 0.0
    for i in range(spec.num_layers):
        kind = spec.at(i)
        seen = context if kind.window is None else min(context, kind.window)
        total += 2.0 * kind.num_kv_heads * kind.head_dim * seen * itemsize
    return total
