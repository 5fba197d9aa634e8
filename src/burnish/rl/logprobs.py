"""Log-probabilities of chosen tokens from hidden states, without ever holding all logits in float32.

The vocabulary projection runs over chunks of trained tokens, as many chunks as there are tokens (a traced count, so
one compiled program serves every fill). Its derivative is written by hand: logits are either kept (cheap while a
micro-batch's fit in `KEEP_BYTES`) or computed again chunk by chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp

from burnish.parallel.rules import Part, per_device

CHUNK_TOKENS = 256
"""Tokens of one chunk: enough for full matrix speed, few enough that a partly filled last chunk costs little."""

KEEP_BYTES = 512 * 2**20
"""Logits are kept for the backward pass up to this size; above it they are recomputed (a third more work there)."""


def selected_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    count: jax.Array,
    temperature: float,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(logits / temperature) at `targets`, and the entropy of that distribution; logits are hidden @ head.T,
    or softcap · tanh of that / softcap.

    hidden (B, M, D) in the compute dtype, head (V, D), targets (B, M) int32; count () int32: columns from `count` on
    are not computed and return 0. Returns two (B, M) float32. The entropy is a metric: no gradient flows through it.
    """
    lp, entropy = _selected((temperature, softcap), hidden, head.astype(hidden.dtype), targets, count)
    return lp, jax.lax.stop_gradient(entropy)


_Scale = tuple[float, float | None]
"""(temperature, softcap)"""

_ROWS = ("batch",)
_HEAD = ("vocab", "embed")


def _chunks(x: jax.Array) -> jax.Array:
    """(B, M, …) -> (C, B · width, …): one chunk of columns, padded at the end, is one matrix."""
    B, M = x.shape[:2]
    width = _width(B, M)
    pad = -M % width
    x = jnp.pad(x, ((0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2)))
    x = x.reshape(B, (M + pad) // width, width, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(x.shape[0], B * width, *x.shape[3:])


def _unchunk(x: jax.Array, B: int, M: int) -> jax.Array:
    """The inverse of `_chunks`."""
    C, rows = x.shape[:2]
    width = rows // B
    return x.reshape(C, B, width, *x.shape[2:]).swapaxes(0, 1).reshape(B, C * width, *x.shape[2:])[:, :M]


def _width(B: int, M: int) -> int:
    """Columns of a chunk."""
    return min(max(1, CHUNK_TOKENS // B), M)


def _logits(hidden: jax.Array, head: jax.Array, scale: _Scale) -> jax.Array:
    """Logits divided by the temperature."""
    temperature, softcap = scale
    logits = jax.lax.dot_general(hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return logits if temperature == 1.0 else logits / temperature


def _hits(part: Part, targets: jax.Array, logits: jax.Array) -> jax.Array:
    """Where, in logits (R, V) of this part of the vocabulary, the target of each row is."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return ids + part.index("vocab") * logits.shape[1] == targets[:, None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _selected(
    scale: _Scale, hidden: jax.Array, head: jax.Array, targets: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """hidden (B, M, D), head (V, D), targets (B, M), count () -> (B, M) logprobs, entropy.

    On a mesh each device has its rows and its part of the vocabulary: what is exchanged are sums per row, never logits.
    """
    return _selected_fwd(scale, hidden, head, targets, count)[0]


def _selected_fwd(scale, hidden, head, targets, count):
    def on_part(part: Part, hidden, head, targets, count):
        B, M, _ = hidden.shape
        head = part.gather(head, "embed", 1)
        hidden, targets = _chunks(hidden), _chunks(targets)
        C, R = targets.shape
        V = head.shape[0]
        keep = 4 * C * R * V <= KEEP_BYTES
        zeros = jnp.zeros((C, R), jnp.float32)
        kept = jnp.zeros((C, R, V) if keep else (0, 0, 0), jnp.float32)

        def body(c, carry):
            lp, entropy, lse, kept = carry
            logits = _logits(hidden[c], head, scale)
            top = part.max(jnp.max(logits, axis=-1, keepdims=True), "vocab")
            shifted = logits - top
            exps = jnp.exp(shifted)
            total = part.sum(jnp.sum(exps, axis=-1), "vocab")
            mean = part.sum(jnp.sum(exps * shifted, axis=-1), "vocab") / total
            log_total = jnp.log(total)
            if part.is_split("vocab"):
                chosen = part.sum(jnp.sum(jnp.where(_hits(part, targets[c], logits), shifted, 0), axis=-1), "vocab")
            else:
                chosen = jnp.take_along_axis(shifted, targets[c][:, None], axis=-1)[:, 0]
            lp = lp.at[c].set(chosen - log_total)
            entropy = entropy.at[c].set(log_total - mean)
            lse = lse.at[c].set(log_total + top[:, 0])
            return lp, entropy, lse, kept.at[c].set(logits) if keep else kept

        used = -(-count // _width(B, M))
        lp, entropy, lse, kept = jax.lax.fori_loop(0, used, body, (zeros, zeros, zeros, kept))
        return _unchunk(lp, B, M), _unchunk(entropy, B, M), lse, kept

    by_chunk, by_logit = (None, "batch"), (None, "batch", "vocab")
    lp, entropy, lse, kept = per_device(
        on_part, [_ROWS, _HEAD, _ROWS, ()], (_ROWS, _ROWS, by_chunk, by_logit), checked=False
    )(hidden, head, targets, count)
    return (lp, entropy), (hidden, head, targets, count, lse, kept)


def _selected_bwd(scale, residuals, cotangents):
    temperature, softcap = scale

    def on_part(part: Part, hidden, head, targets, count, lse, kept, d_lp):
        B, M, _ = hidden.shape
        head = part.gather(head, "embed", 1)
        hidden, targets, d_lp = _chunks(hidden), _chunks(targets), _chunks(d_lp)

        def body(c, carry):
            d_hidden, d_head = carry
            logits = kept[c] if kept.size else _logits(hidden[c], head, scale)
            weight = (d_lp[c] / temperature)[:, None]
            probs = jnp.exp(logits - lse[c][:, None])
            d_logits = jnp.where(_hits(part, targets[c], logits), weight, 0.0) - weight * probs
            if softcap is not None:
                d_logits = d_logits * (1.0 - jnp.square(logits * (temperature / softcap)))
            d_logits = d_logits.astype(head.dtype)
            d_hidden = d_hidden.at[c].set(
                part.sum(jax.lax.dot_general(d_logits, head, (((1,), (0,)), ((), ()))), "vocab")
            )
            d_head = d_head + jax.lax.dot_general(
                d_logits, hidden[c], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            return d_hidden, d_head

        start = (jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32))
        used = -(-count // _width(B, M))
        d_hidden, d_head = jax.lax.fori_loop(0, used, body, start)
        if part.is_split("batch"):
            d_head = part.scatter_sum(d_head, "embed", 1)
            others = tuple(name for name in part.names["batch"] if name not in part.names["embed"])
            d_head = jax.lax.psum(d_head, others) if others else d_head
        else:
            d_head = part.own(d_head, "embed", 1)
        return _unchunk(d_hidden, B, M), d_head.astype(head.dtype)

    axes = [_ROWS, _HEAD, _ROWS, (), (None, "batch"), (None, "batch", "vocab"), _ROWS]
    d_hidden, d_head = per_device(on_part, axes, (_ROWS, _HEAD), checked=False)(*residuals, cotangents[0])
    return d_hidden, d_head, None, None


_selected.defvjp(_selected_fwd, _selected_bwd)
