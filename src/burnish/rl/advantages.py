"""Group-relative advantages (Shao et al. 2024, arXiv:2402.03300; without deviation: Liu et al. 2025, arXiv:2503.20783).

They are computed once, on the host, in float64, from all completions of the step, so they cannot depend on how
the update is split. Completions that could not be scored take no part.
"""

from typing import Literal

import numpy as np

AdvantageStd = Literal["group", "batch", "none"]


def group_advantages(
    rewards: np.ndarray, valid: np.ndarray, std: AdvantageStd = "group", *, ddof: int = 1, eps: float = 1e-4
) -> np.ndarray:
    """(reward - mean of its group) / (standard deviation + eps), per completion.

    rewards (P, G) float; valid (P, G) bool: completions that are not valid are left out of every mean and deviation
    and get 0, and so does a group with fewer than two valid completions, which has nothing to be compared with.
    std: deviation of the "group", of all valid rewards of the "batch", or "none" (no division).
    Returns (P, G) float64. Equal rewards give exactly 0. Raises ValueError on G = 1 and on rewards that are not finite.
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or rewards.shape != np.shape(valid):
        raise ValueError(f"rewards {rewards.shape} and valid {np.shape(valid)} must both be (prompts, completions)")
    if rewards.shape[1] < 2:
        raise ValueError(
            "group-relative advantages need at least 2 completions per prompt, got 1: "
            "set rl.num_generations to 2 or more"
        )
    valid = np.asarray(valid, bool)
    if not np.isfinite(rewards[valid]).all():
        raise ValueError(f"{np.sum(~np.isfinite(rewards[valid]))} valid rewards are not finite numbers")
    rewards = np.where(valid, rewards, 0.0)
    n = valid.sum(axis=1, keepdims=True)
    low = np.where(valid, rewards, np.inf).min(axis=1, keepdims=True)
    high = np.where(valid, rewards, -np.inf).max(axis=1, keepdims=True)
    comparable = valid & (n >= 2) & (high > low)
    centred = np.where(comparable, rewards - rewards.sum(axis=1, keepdims=True) / np.maximum(n, 1), 0.0)
    if std == "none":
        return centred
    if std == "group":
        variance = np.square(centred).sum(axis=1, keepdims=True) / np.maximum(n - ddof, 1)
    elif std == "batch":
        variance = np.var(rewards[valid], ddof=ddof) if valid.sum() > ddof else np.float64(0.0)
    else:
        raise ValueError(f"advantage std is {std!r}; it must be 'group', 'batch' or 'none' (rl.advantage_std)")
    return centred / (np.sqrt(variance) + eps)
