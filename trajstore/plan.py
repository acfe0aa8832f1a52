"""Owns order and batches: pure functions of lengths and seeded keys; knows no rows, no store, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import InputError

Int64s = NDArray[np.int64]


def batches(
    lengths: Int64s,
    batch_size: int,
    *,
    keys: NDArray[np.uint64] | None = None,
    bucket_window: int | None = None,
) -> list[Int64s]:
    """Row positions of each batch of an epoch; every row is in exactly one.

    Args:
        lengths: [N] tokens of each row.
        batch_size: rows of a batch; the last one may be smaller.
        keys: [N] seeded keys; rows go in their order. None keeps the order of the rows.
        bucket_window: batches in a window whose rows are sorted by length before they are cut, so that
            rows of a batch are of like length; the batches of a window then go in the order of their
            keys. None cuts rows as they come.

    Raises:
        InputError: batch_size or bucket_window is below 1.
    """
    check(batch_size, bucket_window)
    order = np.arange(len(lengths)) if keys is None else np.argsort(keys, kind="stable")
    if bucket_window is None:
        return _cut(order, batch_size)
    out: list[Int64s] = []
    for window in _cut(order, batch_size * bucket_window):
        cut = _cut(window[np.argsort(lengths[window], kind="stable")], batch_size)
        if keys is not None:
            cut.sort(key=lambda rows: int(keys[rows].min()))
        out += cut
    return out


def check(batch_size: int, bucket_window: int | None) -> None:
    """Refuses sizes no batch can have.

    Raises:
        InputError: one of them is below 1.
    """
    for name, value in (("batch_size", batch_size), ("bucket_window", bucket_window)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}, expected at least 1")


def _cut(order: Int64s, size: int) -> list[Int64s]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def padding_ratio(lengths: Int64s, plan: Sequence[Int64s]) -> float:
    """Padding / padded size over all batches of a plan; 0.0 when nothing is padded."""
    size = sum(len(rows) * int(lengths[rows].max(initial=0)) for rows in plan)
    tokens = sum(int(lengths[rows].sum()) for rows in plan)
    return 1 - tokens / size if size else 0.0
