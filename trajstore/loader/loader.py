"""Owns TrajectoryLoader, the loop from a row source to torch batches; must not know how rows are stored.

Axis letters: B rows of a batch, T the longest row of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trajstore import layouts, plan
from trajstore.errors import InputError
from trajstore.layouts import Missing, Rows
from trajstore.selection import seeded_keys

_READ = ("tokens", "attention_mask", "loss_mask", "log_probs", "behavior_log_probs", "advantages", "returns")


class RowSource(Protocol):
    """What a loader takes: a Scan, a TrajectoryBatch, or anything else with rows."""

    def rows(self, columns: Sequence[str] = ()) -> Rows:
        """The scalars of all rows and the addresses of these list columns."""
        ...


class TrajectoryLoader:
    """Padded batches of torch tensors, epoch after epoch.

    Each batch is a dict: the tensors of `trajstore.layouts.padded`, and `ids` (list of str), `num_tokens`
    (int) and `padding_ratio` (float). The rows are read and decoded once, when the first epoch begins.

    Args:
        source: a Scan, a TrajectoryBatch, or anything else with `rows(columns)`.
        batch_size: rows of a batch; the last one of an epoch may be smaller.
        device: where the tensors go.
        shuffle: another order each epoch, chosen by `seed` and the rows' ids, not by their files.
        seed: chooses the shuffles.
        bucket_window: batches in a window whose rows are sorted by length before they are cut, which
            lowers padding; None cuts rows as they come.
        pad_token_id, missing, extra: see `trajstore.layouts.padded`.

    Raises:
        InputError: batch_size or bucket_window is below 1; an extra column is in every batch already, or
            is not a per-token column.
        ValidationError: a row has neither loss_mask nor a known split into prompt and response.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        batch_size: int,
        device: Any = "cpu",
        shuffle: bool = False,
        seed: int = 0,
        bucket_window: int | None = None,
        pad_token_id: int = 0,
        missing: Missing = "nan",
        extra: Sequence[str] = (),
    ) -> None:
        plan.check(batch_size, bucket_window)
        for name in extra:
            if name in _READ or name in layouts.SCALARS:
                raise InputError(
                    f"extra column {name!r} is in every batch already, or is not a per-token column",
                    hint=f"to add: {', '.join(layouts.ON_REQUEST)}, or a column of your own",
                )
        self._source = source
        self._batch_size = batch_size
        self._device = torch.device(device)
        self._shuffle = shuffle
        self._seed = seed
        self._bucket_window = bucket_window
        self._pad_token_id = pad_token_id
        self._missing = missing
        self._extra = tuple(extra)
        self._epoch = 0
        self._rows: Rows | None = None

    def set_epoch(self, epoch: int) -> None:
        """Chooses the shuffle that the next iteration takes."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._loaded().lengths) // self._batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = self._loaded()
        epoch, self._epoch = self._epoch, self._epoch + 1
        keys = self._keys(rows, epoch) if self._shuffle else None
        for chosen in plan.batches(
            rows.lengths, self._batch_size, keys=keys, bucket_window=self._bucket_window
        ):
            yield self._batch(rows.take(chosen))

    def _keys(self, rows: Rows, epoch: int) -> NDArray[np.uint64]:
        return seeded_keys(seeded_keys(rows.keys, self._seed).view(np.int64), epoch)

    def _loaded(self) -> Rows:
        if self._rows is None:
            self._rows = self._source.rows((*_READ, *dict.fromkeys(self._extra)))
        return self._rows

    def _batch(self, rows: Rows) -> dict[str, Any]:
        options = layouts.Options(self._pad_token_id, self._missing, self._extra)
        batch = layouts.padded(rows, options)
        return {
            **layouts.to_torch(batch.arrays, self._device),
            "ids": list(rows.ids),
            "num_tokens": batch.num_tokens,
            "padding_ratio": batch.padding_ratio,
        }
