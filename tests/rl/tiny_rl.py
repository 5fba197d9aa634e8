"""A tiny model and hand-made rollouts for the tests of the update, and the slow, plain way to compute its loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tiny_spec import TINY

from burnish.data.types import Prompt
from burnish.models import decoder
from burnish.models.params import init_params
from burnish.rl.losses import LossOptions
from burnish.rl.optimizer import OptimizerOptions
from burnish.rl.schedule import LearningRate
from burnish.rl.update import UpdateOptions
from burnish.rollout.types import Completion, Group, StopReason

SPEC = TINY


def params(seed=0, spec=SPEC):
    return init_params(spec, jax.random.key(seed), std=0.3)


def completion(token_ids, logprobs=None):
    token_ids = np.asarray(token_ids, np.int32)
    logprobs = np.full(len(token_ids), -4.0) if logprobs is None else logprobs
    versions = np.zeros(len(token_ids), np.int32)
    return Completion(token_ids, np.asarray(logprobs, np.float32), versions, StopReason.STOP, "", 0)


def groups(num_prompts=4, num_generations=4, seed=0, *, vocab_size=64, prompt_tokens=4, lengths=(1, 9, 23)):
    """Groups with prompts and completions of random contents, completions of a few lengths."""
    rng = np.random.default_rng(seed)
    return [
        Group(
            Prompt(i, "", "", "", tuple(rng.integers(1, vocab_size, prompt_tokens).tolist())),
            tuple(completion(rng.integers(1, vocab_size, rng.choice(lengths))) for _ in range(num_generations)),
        )
        for i in range(num_prompts)
    ]


def update_options(lr=1e-2, warmup=0, total=100, **changes):
    loss = changes.pop("loss", LossOptions())
    optimizer = changes.pop("optimizer", OptimizerOptions(LearningRate(lr, warmup, total), clip=0.0))
    return UpdateOptions(loss=loss, optimizer=optimizer, **changes)


def row_logprobs(weights, prompt, token_ids, temperature=1.0, spec=SPEC):
    """Logprobs of one completion from its own unpadded row and all of its logits."""
    return _row_logprobs(weights, jnp.asarray(prompt), jnp.asarray(token_ids), temperature, spec)


@partial(jax.jit, static_argnames="spec")
def _row_logprobs(weights, prompt, token_ids, temperature, spec):
    ids = jnp.concatenate([prompt, token_ids])[None]
    hidden = decoder.forward(spec, weights, ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
    logits = decoder.unembed(spec, weights, hidden)[0] / temperature
    full = jax.nn.log_softmax(logits[len(prompt) - 1 : -1], axis=-1)
    return full[jnp.arange(len(token_ids)), token_ids]


def plain_loss(weights, rollouts, advantages, valid, options, temperature=1.0, old=None, reference=None):
    """The loss of the step, one completion at a time. old, reference: weights, or None."""
    terms, lengths = [], []
    for group, group_advantages, group_valid in zip(rollouts, advantages, valid, strict=True):
        for c, advantage, ok in zip(group.completions, group_advantages, group_valid, strict=True):
            if not ok:
                continue
            prompt = group.prompt.token_ids
            lp = row_logprobs(weights, prompt, c.token_ids, temperature)
            before = jax.lax.stop_gradient(lp) if old is None else row_logprobs(old, prompt, c.token_ids, temperature)
            ratio = jnp.exp(lp - before)
            if options.algorithm == "gspo-token":
                s = jax.lax.stop_gradient(jnp.exp(jnp.mean(lp - before)))
                ratio = s * jnp.exp(lp - jax.lax.stop_gradient(lp))
            clipped = jnp.clip(ratio, 1 - options.epsilon_low, 1 + options.epsilon_high)
            term = -jnp.minimum(ratio * advantage, clipped * advantage)
            if options.beta:
                r = row_logprobs(reference, prompt, c.token_ids, temperature) - lp
                term = term + options.beta * jnp.exp(lp - before) * (jnp.exp(r) - r - 1)
            terms.append(term)
            lengths.append(len(c.token_ids))
    if options.aggregation == "sequence-mean-token-mean":
        return sum(jnp.mean(t) for t in terms) / len(terms)
    total = sum(jnp.sum(t) for t in terms)
    return total / (sum(lengths) if options.aggregation == "token-mean" else len(terms))


def largest_difference(a, b):
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
