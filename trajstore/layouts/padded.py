"""Owns the padded layout: rows of one width; knows no columns.

Axis letters: B rows of a batch, T the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from trajstore.layouts.buffers import Buffers
from trajstore.layouts.fields import BatchArrays, Field, Options, RowSource
from trajstore.layouts.kernels import Job, write
from trajstore.layouts.place import Place, Span, kept, padded_place
from trajstore.layouts.ragged import Int64s

DEFAULTS = Options()


def padded(rows: RowSource, options: Options = DEFAULTS, out: Buffers | None = None) -> BatchArrays:
    """One padded batch, T the longest row of it, rounded up to `pad_to_multiple_of`.

    Args:
        rows: B rows.
        options: see `Options`.
        out: memory to use again; None takes fresh memory.

    Returns:
        For trajectories the keys of TENSORS and `extra`: ids and attention_mask [B, T] int64; loss_mask,
        action_mask, log_probs, behavior_log_probs, advantages, returns and extras [B, T] float32; rewards [B]
        float32; versions [B] int64, UNKNOWN_VERSION where not known. Padding is pad_token_id, the pad
        value of a column of the user's own, else 0. attention_mask is 1 on every token of a row that gives
        none.

    Raises:
        ValidationError: a row has neither loss_mask nor a known split; a column is missing and
            `missing="error"`.
        InputError: an extra column is not a per-token column of the rows.
    """
    plan = padded_outline(rows, options)
    return finished(rows, plan.outputs, plan.places, plan.span, plan.size, out)


@dataclass(frozen=True)
class Outline:
    """A batch before its values are written.

    Attributes:
        outputs: what it holds, in order.
        places: of the fields, by name.
        span: the part of each row that is in it.
        size: token positions it takes, padding counted.
    """

    outputs: dict[str, Field | NDArray[Any]]
    places: dict[str, Place]
    span: Span
    size: int


def padded_outline(rows: RowSource, options: Options = DEFAULTS) -> Outline:
    """What `padded` writes, for those who write it elsewhere. Args, Raises: see `padded`."""
    outputs = rows.outputs(options)
    span = kept(rows.lengths, options)
    place = padded_place(span, options.padding_side, options.pad_to_multiple_of)
    places = {
        name: place if field.aligned else padded_place(whole(field), options.padding_side)
        for name, field in fields_of(outputs).items()
    }
    return Outline(outputs, places, span, place.shape[0] * place.width)


def fields_of(outputs: dict[str, Field | NDArray[Any]]) -> dict[str, Field]:
    """The outputs with values a token."""
    return {name: output for name, output in outputs.items() if isinstance(output, Field)}


def whole(field: Field) -> Span:
    """All of each row of a field that has lengths of its own."""
    return kept(field.column.length.clip(0), DEFAULTS)


def finished(
    rows: RowSource,
    outputs: dict[str, Field | NDArray[Any]],
    places: dict[str, Place],
    span: Span,
    size: int,
    out: Buffers | None,
) -> BatchArrays:
    """Writes the fields to their places, and counts what the batch holds."""
    buffers = Buffers() if out is None else out
    jobs = {}
    for name, field in fields_of(outputs).items():
        place = places[name]
        if place.width:
            array, left = buffers.padded(name, place, field.dtype, field.fill)
            jobs[name] = Job(field, place, array, left)
        else:
            jobs[name] = Job(field, place, buffers.array(name, place.shape, field.dtype))
    write(list(jobs.values()))
    arrays = {name: jobs[name].out if name in jobs else values for name, values in outputs.items()}
    return counted(rows, arrays, tuple(jobs), span, size)


def counted(
    rows: RowSource, arrays: dict[str, Any], columns: tuple[str, ...], span: Span, size: int
) -> BatchArrays:
    """A batch with what it counts."""
    tokens = int(span.count.sum())
    if span.count is rows.lengths:
        return BatchArrays(arrays, columns, tokens, size, 0, 0)
    cut = rows.lengths - span.count
    return BatchArrays(arrays, columns, tokens, size, int(cut.sum()), int((cut > 0).sum()))


def padding_ratio(lengths: Int64s) -> float:
    """Padding / (B·T) of one padded batch; 0.0 when it is empty."""
    size = len(lengths) * int(lengths.max(initial=0))
    return 1 - int(lengths.sum()) / size if size else 0.0
