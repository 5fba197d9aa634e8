"""Log-probabilities of chosen tokens from hidden states, without ever holding all logits in float32.

The vocabulary projection runs over chunks of trained tokens, as many chunks as there are tokens (a traced count, so
one compiled program serves every fill). Its derivative is written by hand: logits are either kept (cheap while a
micro-batch's fit in `KEEP_BYTES`) or computed again chunk by chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp

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
    B, M, D = hidden.shape
    V = head.shape[0]
    width = min(max(1, CHUNK_TOKENS // B), M)
    chunks = -(-M // width)
    pad = chunks * width - M
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, pad)))
    # (chunks, B * width, ...): one chunk is one matrix.
    hidden = hidden.reshape(B, chunks, width, D).swapaxes(0, 1).reshape(chunks, B * width, D)
    targets = targets.reshape(B, chunks, width).swapaxes(0, 1).reshape(chunks, B * width)
    keep = 4 * chunks * B * width * V <= KEEP_BYTES
    used = -(-count // width)
    lp, entropy = _chunked((temperature, softcap), keep, hidden, head.astype(hidden.dtype), targets, used)

    def unchunk(a: jax.Array) -> jax.Array:
        return a.reshape(chunks, B, width).swapaxes(0, 1).reshape(B, chunks * width)[:, :M]

    return unchunk(lp), jax.lax.stop_gradient(unchunk(entropy))


_Scale = tuple[float, float | None]
"""(temperature, softcap)"""


def _logits(hidden: jax.Array, head: jax.Array, scale: _Scale) -> jax.Array:
    """Logits divided by the temperature."""
    temperature, softcap = scale
    logits = jax.lax.dot_general(hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return logits if temperature == 1.0 else logits / temperature


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(
    scale: _Scale, keep: bool, hidden: jax.Array, head: jax.Array, targets: jax.Array, used: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """hidden (C, R, D), targets (C, R), used (): the first `used` of C chunks -> (C, R) logprobs, entropy."""
    return _chunked_fwd(scale, keep, hidden, head, targets, used)[0]


def _chunked_fwd(scale, keep, hidden, head, targets, used):
    C, R, _ = hidden.shape
    zeros = jnp.zeros((C, R), jnp.float32)
    kept = jnp.zeros((C, R, head.shape[0]) if keep else (0,), jnp.float32)

    def body(c, carry):
        lp, entropy, lse, kept = carry
        logits = _logits(hidden[c], head, scale)
        top = jnp.max(logits, axis=-1, keepdims=True)
        shifted = logits - top
        exps = jnp.exp(shifted)
        total = jnp.sum(exps, axis=-1)
        mean = jnp.sum(exps * shifted, axis=-1) / total
        log_total = jnp.log(total)
        chosen = jnp.take_along_axis(shifted, targets[c][:, None], axis=-1)[:, 0]
        lp = lp.at[c].set(chosen - log_total)
        entropy = entropy.at[c].set(log_total - mean)
        lse = lse.at[c].set(log_total + top[:, 0])
        return lp, entropy, lse, kept.at[c].set(logits) if keep else kept

    lp, entropy, lse, kept = jax.lax.fori_loop(0, used, body, (zeros, zeros, zeros, kept))
    return (lp, entropy), (hidden, head, targets, used, lse, kept)


def _chunked_bwd(scale, keep, residuals, cotangents):
    temperature, softcap = scale
    hidden, head, targets, used, lse, kept = residuals
    d_lp, _ = cotangents

    def body(c, carry):
        d_hidden, d_head = carry
        logits = kept[c] if keep else _logits(hidden[c], head, scale)
        weight = (d_lp[c] / temperature)[:, None]
        probs = jnp.exp(logits - lse[c][:, None])
        hit = jax.lax.broadcasted_iota(jnp.int32, probs.shape, 1) == targets[c][:, None]
        d_logits = jnp.where(hit, weight, 0.0) - weight * probs
        if softcap is not None:
            d_logits = d_logits * (1.0 - jnp.square(logits * (temperature / softcap)))
        d_logits = d_logits.astype(head.dtype)
        d_hidden = d_hidden.at[c].set(jax.lax.dot_general(d_logits, head, (((1,), (0,)), ((), ()))))
        d_head = d_head + jax.lax.dot_general(
            d_logits, hidden[c], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return d_hidden, d_head

    start = (jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32))
    d_hidden, d_head = jax.lax.fori_loop(0, used, body, start)
    return d_hidden, d_head.astype(head.dtype), None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)
