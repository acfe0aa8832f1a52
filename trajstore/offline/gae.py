"""Owns advantages and returns from values and rewards, whitening, the KL penalty; pure, knows no rows.

Axis letters: B rows, A their actions in one flat array, row i being `[offsets[i], offsets[i + 1])`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import InputError
from trajstore.offline.flat import Float64s, Int64s
from trajstore.offline.scaling import EQUAL


def gae(
    rewards: NDArray[Any],
    values: NDArray[Any],
    offsets: Int64s,
    bootstrap: Float64s,
    *,
    gamma: float,
    lam: float,
) -> tuple[Float64s, Float64s]:
    """Generalised advantage estimation over ragged rows.

    With delta_t = r_t + gamma V_{t+1} - V_t:  A_t = delta_t + gamma lam A_{t+1}, and the return is A_t + V_t
    (Schulman et al. 2016, arXiv:1506.02438, equation 16). V after the last action is `bootstrap`.

    Args:
        rewards, values: [A]; V of the state before each action.
        offsets: [B + 1].
        bootstrap: [B] V after the last action, 0 where the episode ended.
        gamma, lam: discount and the weight of longer estimates, 0 to 1.

    Returns:
        advantages and returns, [A] float64.

    Raises:
        InputError: gamma or lam is outside 0..1.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise InputError(f"{name} is {value}, expected 0 to 1")
    values = values.astype(np.float64)
    lengths = np.diff(offsets)
    last = (offsets[1:] - 1)[lengths > 0]
    following = np.zeros(len(values))
    following[:-1] = values[1:]
    following[last] = bootstrap[lengths > 0]
    advantages = rewards + gamma * following - values
    # From the end, all rows at once: rows that have a step so far back are a shrinking prefix.
    order = np.argsort(-lengths, kind="stable")
    ends, sizes = offsets[1:][order], lengths[order]
    for back in range(1, int(lengths.max(initial=0))):
        at = ends[: np.searchsorted(-sizes, -back)] - 1 - back
        advantages[at] += gamma * lam * advantages[at + 1]
    return advantages, advantages + values


def whiten(x: NDArray[Any], *, shift_mean: bool = True) -> Float64s:
    """Values with mean 0 and sample deviation 1; equal values become 0, not rounding noise over nothing.

    Args:
        x: [A] the trained actions only; padding has no place in a mean.
        shift_mean: False puts the mean back.
    """
    x = x.astype(np.float64)
    if not len(x):
        return x
    mean = x.mean()
    centred = x - mean
    std = centred.std(ddof=1) if len(x) > 1 else 0.0
    flat = std <= EQUAL * np.abs(x).max()
    scaled = np.zeros(len(x)) if flat else centred / std
    return scaled if shift_mean else scaled + mean


def kl_penalty(log_probs: NDArray[Any], reference: NDArray[Any], coefficient: float) -> NDArray[np.float32]:
    """-coefficient (log p - log p_ref) of each token: what PPO adds to the rewards (estimator k1)."""
    penalty: NDArray[Any] = -coefficient * (log_probs.astype(np.float64) - reference)
    return penalty.astype(np.float32)
