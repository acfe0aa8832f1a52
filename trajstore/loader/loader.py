"""Owns TrajectoryLoader, the loop from a row source to torch batches; must not know how rows are stored.

Axis letters: B rows of a batch, N rows of the source.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from trajstore import layouts
from trajstore.errors import InputError
from trajstore.layouts import BatchArrays, Buffers, Dtypes, Missing, Options, RowSource, Side
from trajstore.loader.ahead import Ahead
from trajstore.loader.device import Device, Sent, here
from trajstore.loader.sources import Source, cache_use, source_of
from trajstore.loader.stats import Stats
from trajstore.plan import Layout, Plan, Recipe, Tail, plan
from trajstore.selection import seeded_keys

Batch = dict[str, Any]


@dataclass(frozen=True)
class _At:
    """A place in an epoch: `batch` batches taken of those that worker `worker` of `workers` gives from
    step `base` on."""

    epoch: int
    batch: int = 0
    base: int = 0
    worker: int = 0
    workers: int = 1


class TrajectoryLoader(IterableDataset[Batch]):
    """Batches of torch tensors, epoch after epoch, from rows that are read and decoded once.

    Each batch is a dict: the tensors of its layout (see `trajstore.layouts`), and `ids` (list of str),
    `num_tokens` (int) and `padding_ratio` (float), with max_length also `cut_tokens` (int). Which rows are in
    which batch depends on the rows, the seed, the epoch and the options alone, so every rank can work out
    the batches of every other one.

    It is a torch IterableDataset whose items are whole batches: `DataLoader(loader, batch_size=None,
    num_workers=2, multiprocessing_context="spawn")` gives the same batches in the same order, and so does
    torchdata's StatefulDataLoader. Call `set_epoch` before each epoch then, as workers count for themselves.
    A forked worker is refused: the threads of the store's readers do not live on in it.

    Args:
        source: a Scan, a TrajectoryBatch, an Arrow table, a polars frame, or anything else with
            `rows(columns)` that gives a `trajstore.layouts.RowSource`, or such rows themselves.
        batch_size: rows of a batch; the last one of an epoch may be smaller.
        max_tokens: instead of batch_size, the most tokens of a batch, padding counted.
        layout: `padded`, `packed`, `nested` or `prompt_response`.
        device: where the tensors go. A GPU gets values without padding, in one copy a column beside the
            training step, and pads them there.
        shuffle: another order each epoch, chosen by `seed` and the rows' ids, not by their files.
        seed: chooses the shuffles.
        bucket_window: batches in a window whose rows are sorted by length before they are cut, which
            lowers padding; None cuts rows as they come.
        whole_groups: rows of one group_id are in one batch.
        rank, world_size: which part of each step this process takes; all have equally many steps.
        tail: what becomes of rows that do not fill the last step: `keep`, `drop` or `repeat`; see
            `trajstore.plan.Recipe`.
        prefetch: batches made ahead in a thread; 0 makes each when it is asked for.
        reuse_buffers: batches on the CPU share memory, in turns: one is valid until the next is asked for.
            Fresh memory costs page faults, up to 15 times the copy of a large batch.
        pad_token_id, missing, extra, padding_side, pad_to_multiple_of, max_length, truncation_side, dtypes,
            full_sequence: see `trajstore.layouts.Options`.

    Raises:
        InputError: an option has no such value; an extra column is in every batch already, or is not a
            per-token column.
        ValidationError: a row has neither loss_mask nor a known split into prompt and response, is longer
            than max_tokens, ...
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        layout: Layout = "padded",
        device: Any = "cpu",
        shuffle: bool = False,
        seed: int = 0,
        bucket_window: int | None = None,
        whole_groups: bool = False,
        rank: int = 0,
        world_size: int = 1,
        tail: Tail = "keep",
        prefetch: int = 2,
        reuse_buffers: bool = False,
        pad_token_id: int = 0,
        missing: Missing = "nan",
        extra: Sequence[str] = (),
        padding_side: Side = "right",
        pad_to_multiple_of: int = 1,
        max_length: int | None = None,
        truncation_side: Side = "right",
        dtypes: Dtypes = "torch",
        full_sequence: bool = False,
    ) -> None:
        if layout not in layouts.LAYOUTS:
            raise InputError(f"layout is {layout!r}, expected one of {', '.join(layouts.LAYOUTS)}")
        if not 0 <= rank < world_size:
            raise InputError(f"rank is {rank}, expected 0 to {world_size - 1}")
        if prefetch < 0:
            raise InputError(f"prefetch is {prefetch}, expected 0 or more")
        for name in extra:
            if name in layouts.READ or name in layouts.SCALARS:
                raise InputError(
                    f"extra column {name!r} is in every batch already, or is not a per-token column",
                    hint=f"to add: {', '.join(layouts.ON_REQUEST)}, or a column of your own",
                )
        self._options = Options(
            pad_token_id=pad_token_id,
            missing=missing,
            extra=tuple(dict.fromkeys(extra)),
            padding_side=padding_side,
            pad_to_multiple_of=pad_to_multiple_of,
            max_length=max_length,
            truncation_side=truncation_side,
            dtypes=dtypes,
            full_sequence=full_sequence,
        )
        self._recipe = Recipe(
            batch_size=batch_size,
            max_tokens=max_tokens,
            layout=layout,
            bucket_window=bucket_window,
            whole_groups=whole_groups,
            world_size=world_size,
            tail=tail,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        self._source: Source = source_of(source)
        self._layout = layout
        self._device = torch.device(device)
        self._shuffle = shuffle
        self._seed = seed
        self._rank = rank
        self._prefetch = prefetch
        self._reuse_buffers = reuse_buffers
        self._epoch = 0
        self._resume: _At | None = None
        self._expected = ""
        self._now: _At | None = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        """What does not go to another process."""
        self._pid = os.getpid()
        self._rows: RowSource | None = None
        self._plan: tuple[int, Plan] | None = None
        self._fingerprint = ""
        self._total = self._last = Stats()
        self._spare: list[Device | Sequence[Buffers | None]] = []

    def __getstate__(self) -> dict[str, Any]:
        gone = ("_pid", "_rows", "_plan", "_fingerprint", "_total", "_last", "_spare", "_now")
        return {name: value for name, value in vars(self).items() if name not in gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _now=None)
        self._start_afresh()

    # Where it is

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration takes, from its start."""
        self._epoch, self._resume, self._now = epoch, None, None

    def state_dict(self, batch: int | None = None) -> dict[str, Any]:
        """Where the iteration is: the batches that were handed out, not those made ahead of them.

        Args:
            batch: batches of the epoch that were taken from a plain DataLoader, whose workers cannot say.

        Returns:
            A small dict of plain values, the same one on every rank.
        """
        at = self._resume or self._now or _At(self._epoch)
        if batch is not None:
            at = _At(at.epoch, batch)
        return {"version": 1, "plan": self._fingerprint, **vars(at)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state: the next iteration gives the batches of its epoch that were left.

        Raises:
            InputError: it is no such state. When the next iteration begins: it is of other rows, another
                order, or another number of workers.
        """
        try:
            at = _At(**{name: int(state[name]) for name in _At.__dataclass_fields__})
            known = state["version"] == 1
            self._expected = str(state["plan"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not a state of a TrajectoryLoader: {dict(state)}") from error
        if not known:
            raise InputError(f"the state has version {state['version']}, expected 1")
        self._resume, self._epoch = at, at.epoch

    # Batches

    def __len__(self) -> int:
        """Steps of an epoch: batches that this rank gets."""
        return len(self._planned(self._epoch))

    def __iter__(self) -> Iterator[Batch]:
        if os.getpid() != self._pid:
            raise InputError(
                "this process was forked with an open loader, whose readers' threads it does not have",
                hint='start workers with multiprocessing_context="spawn"',
            )
        worker = get_worker_info()
        at = self._began(0 if worker is None else worker.id, 1 if worker is None else worker.num_workers)
        planned = self._planned(at.epoch)
        steps = range(at.base, len(planned))[at.worker :: at.workers][at.batch :]
        self._now, self._epoch = at, at.epoch + 1
        made = self._made(planned, steps, here(self._device))
        ahead = Ahead(made, self._prefetch) if self._prefetch else None
        try:
            while True:
                asked = time.perf_counter()
                taken = next(made if ahead is None else ahead, None)
                if taken is None:
                    break
                rows, sent = taken
                batch = sent.wait()
                self._now = at = replace(at, batch=at.batch + 1)
                self._count(batch, len(rows.lengths), sent.nbytes, time.perf_counter() - asked)
                item = self._item(rows, batch)
                del taken, rows, sent, batch  # the caller alone decides how long a batch lives
                yield item
                del item
        finally:
            if ahead is not None:
                ahead.close()
        if worker is None:
            # The epoch is over. A worker's state stays at its end: others may still have batches to give.
            self._now = None

    def _began(self, worker: int, workers: int) -> _At:
        """Where an iteration begins: at the state that was loaded, or with the next epoch."""
        self._loaded()
        at, self._resume = self._resume, None
        if at is None:
            return _At(self._epoch, worker=worker, workers=workers)
        if self._expected not in ("", self._fingerprint):
            raise InputError(
                "the state is of other rows, or of a loader with other options",
                hint="scan the snapshot that the run began with: store.at(snapshot).scan(...)",
            )
        if (at.worker, at.workers) == (worker, workers):
            return at
        if at.workers > 1:
            raise InputError(
                f"the state is of worker {at.worker} of {at.workers}, this is {worker} of {workers}",
                hint="resume with as many workers",
            )
        return _At(at.epoch, base=at.base + at.batch, worker=worker, workers=workers)

    def _made(self, planned: Plan, steps: range, device: torch.device) -> Iterator[tuple[RowSource, Sent]]:
        """The batches of some steps; runs ahead of who takes them."""
        rows = self._loaded()
        memory = self._spare.pop() if self._spare else self._memory(device)
        if isinstance(memory, Device) and memory.device != device:
            memory = self._memory(device)
        try:
            for number, step in enumerate(steps):
                chosen = rows.take(planned.batch(step, self._rank))
                if isinstance(memory, Device):
                    yield chosen, memory.send(chosen)
                    continue
                make = layouts.LAYOUTS[self._layout]
                batch = make(chosen, self._options, memory[number % len(memory)])
                tensors = layouts.to_torch(batch.arrays)
                yield chosen, Sent(replace(batch, arrays=tensors), batch.nbytes, None)
        finally:
            self._spare.append(memory)  # the next epoch takes it over

    def _memory(self, device: torch.device) -> Device | Sequence[Buffers | None]:
        """What batches are made in: of a device, or used in turns, or fresh for each."""
        if device.type != "cpu":
            return Device(device, self._layout, self._options)
        # Workers send batches to another process, at a time that nobody tells.
        if not self._reuse_buffers or get_worker_info() is not None:
            return [None]
        return [Buffers() for _ in range(self._prefetch + 2)]  # with the caller, being made, waiting

    def _item(self, rows: RowSource, batch: BatchArrays) -> Batch:
        """What the caller gets."""
        tensors = batch.arrays
        if self._layout == "nested":
            tensors = layouts.to_nested(tensors, batch.columns)
        item = {
            **tensors,
            "ids": list(rows.ids),
            "num_tokens": batch.num_tokens,
            "padding_ratio": batch.padding_ratio,
        }
        if self._options.max_length is not None:
            item["cut_tokens"] = batch.cut_tokens
        return item

    def _count(self, batch: BatchArrays, rows: int, nbytes: int, waited: float) -> None:
        self._last = Stats(
            batches=1,
            rows=rows,
            tokens=batch.num_tokens,
            size=batch.size,
            cut_tokens=batch.cut_tokens,
            cut_rows=batch.cut_rows,
            bytes_moved=nbytes,
            wait_seconds=waited,
        )
        self._total += self._last

    def _planned(self, epoch: int) -> Plan:
        if self._plan is None or self._plan[0] != epoch:
            rows = self._loaded()
            keys = None
            if self._shuffle:
                keys = seeded_keys(seeded_keys(rows.keys, self._seed).view(np.int64), epoch)
            cut = self._options.max_length
            lengths = rows.lengths if cut is None else np.minimum(rows.lengths, cut)
            groups = getattr(rows, "groups", None) if self._recipe.whole_groups else None
            made = plan(lengths, self._recipe, keys=keys, groups=groups, prompt_lengths=rows.prompt_lengths)
            self._plan = epoch, made
        return self._plan[1]

    def _loaded(self) -> RowSource:
        if self._rows is None:
            columns = [*layouts.READ, *self._options.extra]
            self._rows = self._source.rows([*columns, "group_id"] if self._recipe.whole_groups else columns)
            self._total += cache_use(self._source)
            order = repr((self._recipe, self._shuffle, self._seed, self._options.max_length))
            told = hashlib.blake2b(order.encode(), digest_size=16)
            for array in (self._rows.keys, self._rows.lengths):
                told.update(np.ascontiguousarray(array).tobytes())
            self._fingerprint = told.hexdigest()
        return self._rows

    def stats(self) -> Stats:
        """What all batches were that this loader has handed out; `str()` of it is one line."""
        return self._total

    def last_stats(self) -> Stats:
        """What the last batch was."""
        return self._last
