"""Losses on selected-token logprobs: clipped policy gradients with a KL penalty, and cross-entropy.

Every loss is a pure function of one micro-batch whose terms are already divided by the counts of the whole
optimizer step, so that summing over micro-batches, rows or devices gives the same loss however the step was cut.
With one update per batch the old policy is the current one: the ratio is exp(lp - stop_gradient(lp)), always 1,
and only its gradient matters; the printed policy loss is then near 0 by construction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from burnish.rl.types import Denominators, PackedBatch

LossAlgorithm = Literal["grpo", "gspo-token", "cross-entropy"]
Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean"]
Metrics = dict[str, jax.Array]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp: exp(20) is 5e8, far outside any use, and its gradient is still finite."""


@dataclass(frozen=True)
class LossOptions:
    """Which loss. `epsilon_low`/`epsilon_high` bound the ratio to [1 - low, 1 + high]; `beta` weighs the KL penalty;
    `importance_cap` bounds the weights of tokens that were sampled by older weights (None: by the current ones)."""

    algorithm: LossAlgorithm = "grpo"
    aggregation: Aggregation = "sequence-mean-token-mean"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    importance_cap: float | None = None


def token_weights(aggregation: Aggregation, batch: PackedBatch, denominators: Denominators) -> jax.Array:
    """(B, T) float32 weight of each trained token in the step's loss, 0 elsewhere.

    "sequence-mean-token-mean": mean over completions of the mean over their tokens; "token-mean": mean over all
    tokens of the step; "sequence-mean": mean over completions of the sum over their tokens.
    """
    if aggregation == "sequence-mean-token-mean":
        weight = 1.0 / (denominators.sequences * jnp.maximum(batch.lengths, 1.0))
    elif aggregation == "token-mean":
        weight = jnp.full(batch.trained.shape, 1.0, jnp.float32) / denominators.tokens
    elif aggregation == "sequence-mean":
        weight = jnp.full(batch.trained.shape, 1.0, jnp.float32) / denominators.sequences
    else:
        raise ValueError(
            f"rl.loss_agg_mode is {aggregation!r}; it must be "
            "'sequence-mean-token-mean', 'token-mean' or 'sequence-mean'"
        )
    return jnp.where(batch.trained, weight, 0.0)


def loss(
    options: LossOptions, logprobs: jax.Array, entropy: jax.Array, batch: PackedBatch, denominators: Denominators
) -> tuple[jax.Array, Metrics]:
    """This micro-batch's share of the step's loss and metrics; shares add up (`combine`) to those of the step.

    logprobs, entropy: (B, T) float32 of the trained tokens; values at untrained entries are ignored, whatever they
    are. Raises ValueError where beta > 0 and the batch has no reference logprobs.
    """
    # Masked entries are made harmless before any arithmetic: 0 * inf in a backward pass is NaN.
    lp = jnp.where(batch.trained, logprobs, 0.0)
    weights = token_weights(options.aggregation, batch, denominators)
    per_token = jnp.where(batch.trained, 1.0 / denominators.trained_tokens, 0.0)
    metrics = {"entropy": jnp.sum(per_token * jnp.where(batch.trained, entropy, 0.0))}
    if options.algorithm == "cross-entropy":
        value = -jnp.sum(weights * lp)
    else:
        value, policy_metrics = _policy_loss(options, lp, weights, per_token, batch)
        metrics |= policy_metrics
    metrics["loss"] = value
    return value, jax.lax.stop_gradient(metrics)


def _policy_loss(
    options: LossOptions, lp: jax.Array, weights: jax.Array, per_token: jax.Array, batch: PackedBatch
) -> tuple[jax.Array, Metrics]:
    old = jax.lax.stop_gradient(lp) if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = jnp.where(batch.trained, lp - old, 0.0)
    token_ratio = _exp(log_ratio)
    if options.algorithm == "grpo":
        ratio = token_ratio
    elif options.algorithm == "gspo-token":
        ratio = _sequence_ratio(lp, log_ratio, batch)
    else:
        raise ValueError(f"rl.loss_algo is {options.algorithm!r}; it must be 'grpo' or 'gspo-token'")
    clipped = jnp.clip(ratio, 1.0 - options.epsilon_low, 1.0 + options.epsilon_high)
    gain = jnp.minimum(ratio * batch.advantages, clipped * batch.advantages)
    metrics: Metrics = {}
    if options.importance_cap is not None:
        weights, metrics = _importance_weighted(options.importance_cap, old, weights, per_token, batch)
    value = -jnp.sum(weights * gain)

    off_sampler = jnp.where(batch.trained, jnp.abs(lp - batch.sampler_logprobs), 0.0)
    metrics |= {
        "policy_loss": value,
        "clip_fraction": jnp.sum(per_token * (ratio * batch.advantages > clipped * batch.advantages)),
        "ratio_mean": jnp.sum(per_token * ratio),
        "ratio_max": jnp.max(jnp.where(batch.trained, ratio, 0.0)),
        "logprob_difference_mean": jnp.sum(per_token * off_sampler),
        "logprob_difference_max": jnp.max(off_sampler),
    }
    if batch.reference_logprobs is not None:
        kl = k3(lp, jnp.where(batch.trained, batch.reference_logprobs, 0.0))
        metrics["kl"] = jnp.sum(per_token * kl)
        if options.beta:
            # With the ratio kept, the gradient's expectation is that of the reverse KL itself: the estimator's own
            # derivative alone leaves out that the policy also decides which tokens are drawn.
            value = value + options.beta * jnp.sum(weights * token_ratio * kl)
    elif options.beta:
        raise ValueError("the KL penalty (rl.grpo_beta > 0) needs the reference model's logprobs in the batch")
    return value, metrics


def _importance_weighted(
    cap: float, old: jax.Array, weights: jax.Array, per_token: jax.Array, batch: PackedBatch
) -> tuple[jax.Array, Metrics]:
    """Token weights times min(π_old / μ, cap), where μ sampled the tokens and π_old are the weights before the batch's
    first update: the decoupled objective of Hilton et al. 2022 (arXiv:2110.00641), whose clipped ratio is to π_old,
    with the truncation of Espeholt et al. 2018 (arXiv:1802.01561, ρ̄ of eq. 1)."""
    importance = _exp(jnp.where(batch.trained, old - batch.sampler_logprobs, 0.0))
    truncated = jnp.minimum(importance, cap)
    metrics = {
        "importance_weight": jnp.sum(per_token * truncated),
        "importance_truncated": jnp.sum(per_token * (importance > cap)),
    }
    return weights * truncated, metrics


def k3(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """Schulman's low-variance estimator of KL(policy || reference), r - log r - 1 with r = reference / policy
    (http://joschu.net/blog/kl-approx.html); never negative. The log-ratio is clamped before exp."""
    return _exp_excess(jnp.clip(reference - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))


@jax.custom_jvp
def _exp_excess(x: jax.Array) -> jax.Array:
    """exp(x) - x - 1, at least 0 also where rounding is larger than the value; its derivative, exp(x) - 1, is exact
    there too."""
    return jnp.maximum(jnp.expm1(x) - x, 0.0)


_exp_excess.defjvps(lambda tangent, _, x: jnp.expm1(x) * tangent)


def _exp(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _sequence_ratio(lp: jax.Array, log_ratio: jax.Array, batch: PackedBatch) -> jax.Array:
    """GSPO-token (Zheng et al. 2025, arXiv:2507.18071, eq. 14): the value of every token's ratio is that of its
    completion, (prod_t ratio_t)^(1/|y|); its gradient is the token's own."""
    flat = jax.lax.stop_gradient(log_ratio).ravel()
    # Some rows of a micro-batch need not begin with its first completion; numbers of completions follow on one another.
    first = jnp.min(jnp.where(batch.trained, batch.sequences, jnp.iinfo(jnp.int32).max))
    numbers = jnp.where(batch.trained, batch.sequences - first, 0)
    sums = jax.ops.segment_sum(flat, numbers.ravel(), num_segments=flat.size)
    mean = sums[numbers] / jnp.maximum(batch.lengths, 1.0)
    return _exp(jnp.where(batch.trained, mean + lp - jax.lax.stop_gradient(lp), 0.0))


def combine(shares: Sequence[Metrics]) -> Metrics:
    """The step's metrics from its micro-batches' shares: maxima of `*_max`, sums of the rest."""
    return {
        name: jnp.max(jnp.stack([s[name] for s in shares]))
        if is_maximum(name)
        else jnp.sum(jnp.stack([s[name] for s in shares]))
        for name in shares[0]
    }


def is_maximum(name: str) -> bool:
    """Whether the shares of this metric are combined to their maximum and not to their sum."""
    return name.endswith("_max")
