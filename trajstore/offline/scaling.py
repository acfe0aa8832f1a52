"""Owns the scaling of returns and its statistics: trlX's and the sound one; pure numpy, knows no rows.

Axis letters: N trajectories, A the actions of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trajstore.offline.flat import Bools, Float64s, Int64s
from trajstore.offline.windows import last_of

Scaling = Literal["none", "global", "group"]

EQUAL = 1e-12
"""Returns whose standard deviation is below this part of the largest one are equal: the rest is rounding."""


@dataclass(frozen=True)
class ReturnScale:
    """Statistics of returns; `(r - mean) / std` is the scaled return.

    Attributes:
        kind: "none", "global", "group" or "trlx".
        mean, std: of all complete returns, with ddof = 1; for "group" they are [N] columns of the set.
        count: returns they were made from.
    """

    kind: str
    mean: float = 0.0
    std: float = 1.0
    count: int = 0

    def to_dict(self) -> Mapping[str, Any]:
        """As plain values, for the metadata of a file."""
        return {"kind": self.kind, "mean": self.mean, "std": self.std, "count": self.count, "ddof": 1}


def trlx_scaled(returns: Float64s, *, guarded: bool) -> tuple[Float64s, ReturnScale]:
    """trlX's normalisation: centred, over the sample deviation of the centred returns plus eps.

    Args:
        returns: [N] float64; one NaN makes all of them NaN, as there.
        guarded: a deviation that is NaN (one return) is not divided by; trlX's seq2seq path has no guard.
    """
    mean = returns.mean() if len(returns) else np.nan
    centred = returns - mean
    std = centred.std(ddof=1) if len(returns) > 1 else np.nan
    if not (guarded and np.isnan(std)):
        centred = centred / (std + np.finfo(np.float64).eps)
    return centred, ReturnScale("trlx", float(mean), float(std), len(returns))


@dataclass(frozen=True)
class Scaled:
    """Per-row statistics of the sound scaling; [N] each."""

    mean: Float64s
    std: Float64s
    scale: ReturnScale


def statistics(kind: Scaling, returns: Float64s, complete: Bools, groups: Int64s) -> Scaled:
    """Mean and deviation for each row, from complete returns only.

    Deviations of equal returns (and of a single one) are given as 0: `apply` then divides by nothing.

    Args:
        kind: "none" leaves the rewards as they are.
        returns: [N] float64, sum of a row's rewards.
        complete: [N] the episode ended, so the return is all of it.
        groups: [N] int64 codes of the groups, from 0.
    """
    if kind == "global":
        groups = np.zeros(len(returns), np.int64)
    if kind == "none" or not len(returns):
        return Scaled(np.zeros(len(returns)), np.ones(len(returns)), ReturnScale(kind))
    size = int(groups.max()) + 1
    mine, r = groups[complete], returns[complete]
    count = np.bincount(mine, minlength=size)
    mean = np.bincount(mine, r, size) / np.maximum(count, 1)
    centred = r - mean[mine]
    mean = mean + np.bincount(mine, centred, size) / np.maximum(count, 1)  # the second pass of the mean
    std = np.sqrt(np.bincount(mine, (r - mean[mine]) ** 2, size) / np.maximum(count - 1, 1))
    largest = np.zeros(size)
    np.maximum.at(largest, mine, np.abs(r))
    std[(count < 2) | (std <= EQUAL * largest)] = 0
    whole = ReturnScale(kind, count=int(count.sum()))
    if kind == "global":
        whole = ReturnScale(kind, float(mean[0]), float(std[0]), int(count[0]))
    return Scaled(mean[groups], std[groups], whole)


def apply(
    rewards: NDArray[np.float32], last: Float64s, counts: Int64s, complete: Bools, dense: Bools, by: Scaled
) -> NDArray[np.float32]:
    """Rewards over the deviation, the mean taken off at the end of the episode; in place.

    The mean is a constant paid when the episode ends, so a row that is cut off gets it through V. A complete
    row with one reward r at its end thus holds (r - mean) / std, as in trlX.

    Args:
        rewards: [A] float32.
        last: [N] float64, the reward of each row's last action.
        counts: [N] actions of each row, none of them 0.
        complete, by: as in `statistics`, and its result.
        dense: [N] rows with rewards before their last action.
    """
    if by.scale.kind == "none":
        return rewards
    divisor = np.where(by.std > 0, by.std, 1.0)
    if dense.any():
        rewards /= np.repeat(divisor, counts)
    shifted = np.where(complete, last - by.mean, last)
    flat = (by.std == 0) & complete & ~dense
    shifted[flat & (np.abs(shifted) <= EQUAL * np.abs(last))] = 0
    rewards[last_of(counts)] = shifted / divisor
    return rewards
