"""Mixture of experts, dropless: every token reaches all of its experts, whatever else is in the batch.

Pairs of token and expert are sorted by expert and go through two grouped matrix products, so a
token's result depends on no other token. The router is float32. What each expert got is returned for metrics;
nothing here adds a loss.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from burnish.models import tpu
from burnish.models.params import Params
from burnish.models.spec import ModelSpec
from burnish.parallel.mesh import platform
from burnish.parallel.rules import Part, per_device


class Routing(NamedTuple):
    """Which experts each token goes to, of T tokens with A experts each."""

    experts: jax.Array  # (T, A) int32, the most probable first; of equal ones the lower number
    weights: jax.Array  # (T, A) float32
    entropy: jax.Array  # (T,) float32, of the distribution over all experts, nats


def route(spec: ModelSpec, p: Params, x: jax.Array) -> Routing:
    """x (T, D), what the router reads, in float32."""
    assert spec.experts is not None
    logits = jnp.dot(x, p["router"].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    probs = jnp.exp(logprobs)
    # On each device's rows: the compiler can not split top_k and would gather all rows' probabilities for it.
    rows, num_active = ("batch",), spec.experts.num_active
    weights, experts = per_device(lambda _, probs: tuple(jax.lax.top_k(probs, num_active)), [rows], (rows, rows))(probs)
    if spec.experts.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    if "expert_scale" in p:
        weights = weights * p["expert_scale"].astype(jnp.float32)[experts]
    return Routing(experts, weights, jax.lax.stop_gradient(-jnp.sum(probs * logprobs, axis=-1)))


def apply_experts(spec: ModelSpec, p: Params, x: jax.Array, routing: Routing, activation) -> jax.Array:
    """x (T, D), what the experts read -> (T, D) in x's dtype: the weighted sum of each token's experts.

    On a mesh every device of an expert group gets the tokens of the whole group and runs those that go to its own
    experts, and the group adds up what they came to. Sending each token only to where its experts are would need
    room for the worst case, which is all tokens, so there would be nothing to gain in memory; and with several
    experts a token, most tokens go to most devices anyway.
    """
    assert spec.experts is not None
    gate_up, down = p["expert_gate_up_proj"].astype(x.dtype), p["expert_down_proj"].astype(x.dtype)

    def on_part(
        part: Part, x: jax.Array, chosen: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        # Gate and up as one axis: of arrays with four axes TPU sums the gradient whole on every device.
        gate_up = part.gather(gate_up.reshape(*gate_up.shape[:2], -1), "embed", 1)
        down = part.gather(down, "embed", 2)
        grouped = part.is_split("experts") and part.is_split("batch")
        if grouped:
            x, chosen, weights = (part.gather(a, "experts", 0) for a in (x, chosen, weights))
        y = part.sum(_own_experts(part, x, chosen, weights, gate_up, down, activation), "mlp")
        return (part.scatter_sum(y, "experts", 0) if grouped else part.sum(y, "experts")).astype(x.dtype)

    rows = ("batch",)
    axes = [rows, rows, rows, ("experts", "embed", None, "mlp"), ("experts", "mlp", "embed")]
    # The TPU kernel does not tell how its result varies over devices: derivatives then have sums that change nothing.
    checked = platform() != "tpu"
    return per_device(on_part, axes, rows, checked=checked)(x, routing.experts, routing.weights, gate_up, down)


def _own_experts(
    part: Part, x: jax.Array, chosen: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array, activation
) -> jax.Array:
    """x (T, D), chosen and weights (T, A), gate_up (E, D, 2·F), down (E, F, D) of this part's experts -> (T, D)
    float32: what these experts add to each token."""
    (T, D), A = x.shape, chosen.shape[1]
    E, F, _ = down.shape
    chosen = chosen.reshape(T * A)
    if part.is_split("experts"):
        own = chosen - part.index("experts") * E
        here = (own >= 0) & (own < E)
        chosen = jnp.where(here, own, E)  # other devices' pairs come last, in no group
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=E).astype(jnp.int32)
    rows = x[order // A]
    if part.is_split("experts"):  # what comes of a row in no group is undefined, forwards and backwards
        rows = jnp.where(here[order][:, None], rows, 0)
    grouped_dot = tpu.grouped_dot if platform() == "tpu" else jax.lax.ragged_dot
    h = grouped_dot(rows, gate_up, sizes)
    h = activation(h[:, :F]) * h[:, F:]
    h = grouped_dot(h, down, sizes)
    # Back in the tokens' order, so that a token's experts are summed in one order, the most probable first.
    h = h[jnp.argsort(order)].astype(jnp.float32)
    if part.is_split("experts"):
        h = jnp.where(here[:, None], h, 0)
    return jnp.sum(h.reshape(T, A, D) * weights[..., None], axis=1)


class Load(NamedTuple):
    """What the routers of M layers did with the tokens that count; adds up over micro-batches."""

    tokens: jax.Array  # (M, E) float32, tokens that each expert got
    entropy: jax.Array  # (M,) float32, sum over tokens


def load_metrics(spec: ModelSpec, load: Load) -> dict[str, jax.Array]:
    """How evenly the experts were used, over layers: the busiest expert's tokens in multiples of an even share, the
    share of experts that got none, and the mean entropy of the router (nats; log E is even)."""
    assert spec.experts is not None
    routed = jnp.maximum(load.tokens.sum(axis=-1), 1.0)  # (M,)
    even = routed / spec.experts.num_experts
    return {
        "experts/load_max": jnp.max(load.tokens / even[:, None]),
        "experts/idle": jnp.mean(load.tokens == 0),
        "experts/router_entropy": jnp.mean(load.entropy * spec.experts.num_active / routed),
    }


def load_of(spec: ModelSpec, routing: Routing, counts: jax.Array) -> Load:
    """The Load (without the layer axis) of one layer; counts (T,) bool, True at the tokens that are counted."""
    assert spec.experts is not None
    num_experts = spec.experts.num_experts

    def on_part(part: Part, experts: jax.Array, counts: jax.Array) -> jax.Array:
        weight = jnp.broadcast_to(counts[:, None], experts.shape).astype(jnp.float32)
        return part.sum(jnp.zeros(num_experts, jnp.float32).at[experts].add(weight), "batch")

    tokens = per_device(on_part, [("batch",)] * 2, ())(routing.experts, counts)
    return Load(tokens, jnp.sum(jnp.where(counts, routing.entropy, 0.0)))
