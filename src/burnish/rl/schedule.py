"""The learning rate over a run: linear warm-up to the peak, then cosine decay to 0."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class LearningRate:
    """lr(n), n updates done so far. lr(warmup_steps) is the peak, lr(total_steps) is 0.

    Warm-up starts one step above 0, so that no update of a run has a learning rate of exactly 0: the first uses
    lr(0) = peak / (warmup_steps + 1), the last lr(total_steps - 1) > 0.
    """

    peak: float
    warmup_steps: int
    total_steps: int

    def __call__(self, n: jax.Array | int) -> jax.Array:
        """float32 learning rate of the update that follows n others; 0 beyond total_steps."""
        n = jnp.asarray(n, jnp.float32)
        rising = (n + 1) / (self.warmup_steps + 1)
        progress = (n - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
        falling = 0.5 * (1 + jnp.cos(math.pi * jnp.clip(progress, 0, 1)))
        return self.peak * jnp.where(n < self.warmup_steps, rising, falling)

    def corner_points(self) -> list[tuple[int, float]]:
        """(updates done, learning rate) at the start, the peak, half-way down and the end."""
        half = (self.warmup_steps + self.total_steps) // 2
        points = sorted({0, self.warmup_steps, half, self.total_steps})
        return [(n, float(self(n))) for n in points]


def learning_rate(peak: float, warmup_fraction: float, run_steps: int, schedule_steps: int = -1) -> LearningRate:
    """The schedule over `schedule_steps` updates, -1 = the run's own number `run_steps`."""
    total = run_steps if schedule_steps == -1 else schedule_steps
    if total < 1:
        raise ValueError(
            f"the learning-rate schedule has {total} steps; num_batches × rl.num_iterations (or "
            "learning_rate_schedule_steps) must be at least 1"
        )
    return LearningRate(peak, int(warmup_fraction * total), total)
