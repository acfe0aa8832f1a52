"""Owns what PPO reads of stored rows: log-probs, values, rewards and KL penalties by token; no elements.

Axis letters: B rows of a block, N the tokens of all of them.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import ValidationError
from trajstore.offline import flat
from trajstore.offline.flat import Bools, Int64s
from trajstore.offline.gae import kl_penalty

LogProbs = Literal["trainer", "behavior"]


def values_of(batch: pa.RecordBatch, offsets: Int64s, first_row: int, wanted: Bools) -> NDArray[Any]:
    """[N] values, NaN where a row has none.

    Args:
        batch, offsets: rows, and where their tokens are.
        first_row: number of the first of them, for messages.
        wanted: [B] rows that have to have them.

    Raises:
        ValidationError: a wanted row has no values.
    """
    missing = wanted & ~flat.present(batch, "values")
    hint = "they are a critic's: write them with store.maintenance.update"
    refuse(batch, first_row, "values", missing, "the row has no values", hint)
    return flat.token_column(batch, "values", offsets, np.full(int(offsets[-1]), np.nan, np.float32))


def rewards_of(batch: pa.RecordBatch, offsets: Int64s, mask: Bools, trained: Bools) -> NDArray[np.float32]:
    """[N] `token_rewards`, else `reward` at the last token of `mask`; `trained` [B]: rows that have one."""
    scalar = np.zeros(len(mask), np.float32)
    at = np.flatnonzero(mask)
    ends = np.searchsorted(at, offsets[1:])
    scalar[at[ends[trained] - 1]] = batch.column("reward").to_numpy()[trained]
    return flat.token_column(batch, "token_rewards", offsets, scalar)


def log_probs_of(
    batch: pa.RecordBatch, offsets: Int64s, first_row: int, which: LogProbs, wanted: Bools
) -> NDArray[Any]:
    """[N] the trainer's log-probs, with "behavior" else the engine's; NaN where a row has none.

    Raises:
        ValidationError: a wanted row has none.
    """
    nan = np.full(int(offsets[-1]), np.nan, np.float32)
    has = flat.present(batch, "log_probs")
    hint = "have the trainer write log_probs"
    if which == "behavior":
        has = has | flat.present(batch, "behavior_log_probs")
        nan = flat.token_column(batch, "behavior_log_probs", offsets, nan)
    else:
        hint += ', or pass log_probs="behavior" to take the engine\'s'
    refuse(batch, first_row, "log_probs", wanted & ~has, "the row has no log-probs", hint)
    return flat.token_column(batch, "log_probs", offsets, nan)


def penalties_of(
    batch: pa.RecordBatch,
    offsets: Int64s,
    log_probs: NDArray[Any],
    first_row: int,
    reference: str,
    coefficient: float,
    wanted: Bools,
) -> NDArray[np.float32]:
    """[N] KL penalty against the log-probs of a column of the user's own, NaN where a row has none.

    Raises:
        ValidationError: a wanted row does not have it.
    """
    refuse(batch, first_row, reference, wanted & ~flat.present(batch, reference), "the row does not have it")
    theirs = flat.token_column(batch, reference, offsets, np.full(len(log_probs), np.nan, np.float32))
    return kl_penalty(log_probs, theirs, coefficient)


def any_token(mask: Bools, offsets: Int64s) -> Bools:
    """[B] whether any token of a row is in the mask."""
    counted = np.concatenate([[0], np.cumsum(mask)])
    some: Bools = counted[offsets[1:]] > counted[offsets[:-1]]
    return some


def refuse(
    batch: pa.RecordBatch, first_row: int, column: str, bad: Bools, reason: str, hint: str | None = None
) -> None:
    """Names the first row of `bad` [B].

    Raises:
        ValidationError: there is one.
    """
    if bad.any():
        i = int(bad.argmax())
        raise ValidationError(reason, row=first_row + i, id=flat.id_of(batch, i), column=column, hint=hint)
