"""Owns trlX's `make_experience` with its quirks, on flat arrays; the sound builder is ilql.py.

research/ilql.md §1.1 to §1.5 is the text this follows. Where trlX crashes (and with it the whole set),
here is a ValidationError that names the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import LengthMismatchError, ValidationError
from trajstore.offline import flat, scaling, windows
from trajstore.offline.flat import Float64s, Int64s
from trajstore.offline.ilql_set import Part
from trajstore.offline.scaling import ReturnScale
from trajstore.offline.windows import Side, Windows


def parts(
    table: pa.Table,
    returns: Float64s | None,
    architecture: str,
    *,
    max_length: int | None,
    side: Side,
    bos: int | None,
) -> tuple[list[Part], ReturnScale]:
    """What trlX makes of these rows.

    Args:
        table: stored rows; the runs of their loss masks are the outputs.
        returns: in place of the rows' `reward`. Rows past its end earn nothing (trlX zips).
        architecture: "causal" or "seq2seq".
        max_length, side: as in trlX's tokenize_dialogue.
        bos: put in front of a row that starts with an output; None (trlX's pre-tokenised path) puts nothing
            there, and the first action then is at -1.

    Raises:
        ValidationError: a row that crashes trlX.
        LengthMismatchError: there are more returns than rows.
    """
    if returns is None:
        returns = table.column("reward").to_numpy()
    if len(returns) > len(table):
        raise LengthMismatchError(f"returns has length {len(returns)}, the rows are {len(table)}")
    scaled, scale = scaling.trlx_scaled(returns, guarded=architecture == "causal")
    earned = np.zeros(len(table))
    earned[: len(scaled)] = scaled
    out, seen = [], 0
    for batch in flat.blocks(table):
        rows = slice(seen, seen + len(batch))
        tokens, offsets = flat.offsets_of(batch)
        mask = flat.loss_mask(batch, offsets, seen)
        kept = windows.cut(mask, offsets, max_length, side, prefix=bos is not None)
        make = _causal if architecture == "causal" else _seq2seq
        out.append(make(batch, seen, tokens, offsets, mask, kept, earned[rows], bos or 0))
        seen += len(batch)
    return out, scale


def _causal(
    batch: pa.RecordBatch,
    first_row: int,
    tokens: NDArray[Any],
    offsets: Int64s,
    mask: flat.Bools,
    kept: Windows,
    earned: Float64s,
    bos: int,
) -> Part:
    placed = windows.index(np.flatnonzero(mask), kept)
    none = placed.counts == 0
    _refuse(
        batch,
        first_row,
        none & ~kept.prefixed,
        "no output is left (trlX: RuntimeError, hstack expects a non-empty TensorList)",
    )
    _refuse(
        batch,
        first_row,
        none,
        "no action is left behind the bos token (trlX: IndexError, index -1 is out of bounds)",
    )
    inputs = windows.column(tokens, offsets, kept, bos)
    return _part(batch, inputs, None, placed.counts, placed.actions, placed.states, earned)


def _seq2seq(
    batch: pa.RecordBatch,
    first_row: int,
    tokens: NDArray[Any],
    offsets: Int64s,
    mask: flat.Bools,
    kept: Windows,
    earned: Float64s,
    bos: int,
) -> Part:
    """Every output adds indices, only the first one adds tokens: multi-turn is broken, as in trlX."""
    lengths = kept.lengths
    ends = np.cumsum(lengths)
    inside = windows.take(tokens, kept, bos), windows.take(mask, kept, 0)
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts_row = np.zeros(len(row), np.bool_)
    starts_row[(ends - lengths)[lengths > 0]] = True
    before = np.concatenate([[False], inside[1][:-1]]) & ~starts_row
    after = np.concatenate([inside[1][1:], [False]])
    after[(ends - 1)[lengths > 0]] = False
    run_start, run_end = np.flatnonzero(inside[1] & ~before), np.flatnonzero(inside[1] & ~after) + 1
    run_row, run_length = row[run_start], run_end - run_start

    runs = np.bincount(run_row, minlength=len(lengths))
    _refuse(batch, first_row, runs == 0, "no output is left (trlX: IndexError, list index out of range)")
    counts = np.bincount(run_row, run_length - 1, len(lengths)).astype(np.int64)
    _refuse(
        batch,
        first_row,
        counts == 0,
        "the output has one token, so no action (trlX: IndexError, index -1 is out of bounds)",
    )
    run_ends = np.cumsum(runs)
    first, last = run_ends - runs, run_ends - 1
    actions = flat.ranges(np.zeros(len(run_row), np.int64), run_length - 1).astype(np.int32)
    states = np.insert(actions, np.cumsum(counts), (run_length[last] - 1).astype(np.int32))
    encoder = Windows(ends - lengths, run_start[first], kept.prefixed & False, kept.cut_off)
    decoder = Windows(run_start[first], run_end[first], kept.prefixed & False, kept.cut_off)
    return _part(
        batch,
        flat.lists(windows.take(inside[0], encoder, 0), encoder.lengths),
        flat.lists(windows.take(inside[0], decoder, 0), decoder.lengths),
        counts,
        actions,
        states,
        earned,
    )


def _part(
    batch: pa.RecordBatch,
    inputs: pa.ListArray,
    decoder: pa.ListArray | None,
    counts: Int64s,
    actions: windows.Int32s,
    states: windows.Int32s,
    earned: Float64s,
) -> Part:
    rewards = np.zeros(len(actions), np.float32)
    rewards[windows.last_of(counts)] = earned
    yes = np.ones(len(counts), np.bool_)
    return Part(
        batch=batch,
        inputs=inputs,
        attention=None,
        decoder=decoder,
        counts=counts,
        rewards=rewards,
        actions=actions,
        states=states,
        terminal=yes,
        action_mask=None,
        last_reward=earned,
        total=earned,
        dense=~yes,
        groups=np.full(len(counts), -1, np.int64),
    )


def _refuse(batch: pa.RecordBatch, first_row: int, bad: flat.Bools, reason: str) -> None:
    if bad.any():
        i = int(bad.argmax())
        raise ValidationError(
            reason,
            row=first_row + i,
            id=flat.id_of(batch, i),
            hint="the default mode leaves such rows out and counts them; or raise max_length",
        )
