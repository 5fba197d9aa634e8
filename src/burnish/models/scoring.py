"""From products of queries and keys to scores: what every way of computing attention shares."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from burnish.models.spec import ModelSpec

MASKED = -1e30
"""The score of a pair that is not visible: finite, so that a row that sees nothing stays finite."""

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Scoring(NamedTuple):
    """How products of queries and keys become scores."""

    scale: float
    softcap: float | None  # scaled scores are bounded to ±softcap by tanh

    def __call__(self, products: jax.Array) -> jax.Array:
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)


def scoring(spec: ModelSpec) -> Scoring:
    """That of one kind of layer."""
    scale = spec.head_dim**-0.5 if spec.query_scale is None else spec.query_scale
    return Scoring(scale, spec.attention_softcap)
