"""Owns stored rows as flat arrays and offsets, with the defaults of the row filled in; knows no algorithm.

Axis letters: B rows of a block, N the tokens of all of them, row i being `[offsets[i], offsets[i + 1])`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trajstore.errors import SchemaError, ValidationError

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Float64s = NDArray[np.float64]

UNFINISHED = "not finished: aborted, failed or still generating"
"""Why such a row is in no set."""

_UNFINISHED = pa.array(["aborted", "failed", "generating"])

BLOCK_TOKENS = 2**18
"""Tokens of a block: what fits the cache is indexed about twice as fast as what does not."""


@runtime_checkable
class ArrowSource(Protocol):
    """What a builder takes: a Scan or a TrajectoryBatch; an Arrow table of stored rows is taken as it is."""

    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        ...


def read(source: ArrowSource | pa.Table, needed: Sequence[str], optional: Sequence[str] = ()) -> pa.Table:
    """The columns that a builder needs, and those of the optional ones that are there.

    Raises:
        SchemaError: a needed column is not there.
    """
    schema = source.schema if isinstance(source, pa.Table) or hasattr(source, "schema") else None
    narrow = getattr(source, "columns", None)
    if not isinstance(source, pa.Table):
        if callable(narrow) and schema is not None:
            names = [name for name in (*needed, *optional) if name in schema.names]
            source = narrow(names)
        source = source.to_arrow()
    for name in needed:
        if name not in source.schema.names:
            raise SchemaError(f"the rows have no column {name!r}", hint="add it to columns=")
    return source.select([name for name in (*needed, *optional) if name in source.schema.names])


def blocks(table: pa.Table, tokens: int = BLOCK_TOKENS) -> Iterator[pa.RecordBatch]:
    """The rows in order, in record batches of about so many tokens, over the same memory."""
    for batch in table.to_batches():
        lengths = batch.column("length").to_numpy().astype(np.int64)
        number = (np.cumsum(lengths) - lengths) // tokens
        edges = np.flatnonzero(np.diff(number, prepend=-1, append=np.iinfo(np.int64).max))
        for start, end in pairwise(edges):
            yield batch.slice(start, end - start)


@dataclass(frozen=True)
class Masks:
    """What each token is.

    Attributes:
        actions: [N] sampled by the policy.
        trained: [N] sampled by the policy and trained on.
    """

    actions: Bools
    trained: Bools


def offsets_of(batch: pa.RecordBatch) -> tuple[NDArray[Any], Int64s]:
    """The tokens of all rows, [N] int32 over Arrow's memory, and [B + 1] offsets into them."""
    column = batch.column("tokens")
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]


def token_column(batch: pa.RecordBatch, name: str, offsets: Int64s, default: NDArray[Any]) -> NDArray[Any]:
    """A per-token column, [N]; null rows take their part of `default`, which is returned when all are null.

    The result may be Arrow's own memory: nobody writes to it.
    """
    if name not in batch.schema.names:
        return default
    column = batch.column(name)
    if column.null_count == len(column):
        return default
    values: NDArray[Any] = column.flatten().to_numpy()
    if column.null_count == 0:
        return values
    out = default.astype(values.dtype)
    out[np.repeat(np.asarray(column.is_valid()), np.diff(offsets))] = values
    return out


def present(batch: pa.RecordBatch, name: str) -> Bools:
    """[B] whether each row has the column."""
    if name not in batch.schema.names:
        return np.zeros(len(batch), np.bool_)
    return np.asarray(batch.column(name).is_valid())


def loss_mask(batch: pa.RecordBatch, offsets: Int64s, first_row: int = 0) -> Bools:
    """[N] what the row trains on: its loss_mask, else 0 on the prompt and 1 after it.

    Raises:
        ValidationError: a row has neither loss_mask nor a known split; counted from `first_row`.
    """
    lengths = np.diff(offsets)
    given = present(batch, "loss_mask")
    if given.all() and len(given):
        return _as_bool(batch.column("loss_mask").flatten().to_numpy())
    prompts = integers(batch, "prompt_length", -1)
    underivable = ~given & (prompts < 0) & (lengths > 0)
    if underivable.any():
        i = int(underivable.argmax())
        raise ValidationError(
            "neither loss_mask nor the split into prompt and response is known",
            row=first_row + i,
            id=id_of(batch, i),
            column="loss_mask",
            hint="store the row with loss_mask, or with prompt_length and response_length",
        )
    prompts = np.clip(prompts, 0, lengths)
    split = np.stack([prompts, lengths - prompts], axis=1).ravel()
    response = np.repeat(np.tile(np.array([0, 1], np.int8), len(lengths)), split)
    return _as_bool(token_column(batch, "loss_mask", offsets, response))


def masks(batch: pa.RecordBatch, offsets: Int64s, first_row: int = 0) -> Masks:
    """What each token is; action_mask that is not given is loss_mask.

    Raises:
        ValidationError: a row has neither loss_mask nor a known split.
    """
    loss = loss_mask(batch, offsets, first_row)
    actions = token_column(batch, "action_mask", offsets, loss)
    if actions is loss:
        return Masks(loss, loss)
    actions = _as_bool(actions)
    return Masks(actions, actions & loss)


def _as_bool(mask: NDArray[Any]) -> Bools:
    # int8 zeros and ones have the bytes of a bool array: a view costs nothing.
    return mask if mask.dtype == np.bool_ else mask.view(np.bool_)


def integers(batch: pa.RecordBatch, name: str, unknown: int) -> Int64s:
    """[B] a scalar integer column, `unknown` where it is null or not there."""
    if name not in batch.schema.names:
        return np.full(len(batch), unknown, np.int64)
    return pc.fill_null(batch.column(name), unknown).to_numpy().astype(np.int64)  # type: ignore[no-any-return]  # pyarrow is untyped


def flags(batch: pa.RecordBatch, name: str) -> NDArray[np.int8]:
    """[B] a nullable bool column: 1, 0, or -1 where it is null or not there."""
    if name not in batch.schema.names:
        return np.full(len(batch), -1, np.int8)
    return pc.fill_null(batch.column(name).cast(pa.int8()), -1).to_numpy()  # type: ignore[no-any-return]  # pyarrow is untyped


def unfinished(batch: pa.RecordBatch) -> Bools:
    """[B] rows that are aborted, failed or still generating: what they end with is no outcome."""
    if "status" not in batch.schema.names:
        return np.zeros(len(batch), np.bool_)
    return np.asarray(pc.is_in(batch.column("status"), _UNFINISHED))


def id_of(batch: pa.RecordBatch, row: int) -> str:
    """The name of a row, for a message."""
    return str(batch.column("id")[row]) if "id" in batch.schema.names else ""


def ranges(starts: Int64s, lengths: Int64s) -> Int64s:
    """`[starts[0] .. starts[0] + lengths[0])`, then the next row's, in one flat array."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    flat: Int64s = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return flat


def lists(values: NDArray[Any], lengths: Int64s) -> pa.ListArray:
    """A list column without nulls, over the memory of `values`."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    kind = pa.list_(pa.field("element", pa.from_numpy_dtype(values.dtype), nullable=False))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=kind)
