"""Owns ragged rows → padded arrays and tensors: the one definition of padding; knows no store and no objects.

Axis letters: B rows of a batch, T the longest row of it, N rows of a column. torch is imported when called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import InputError, ValidationError

if TYPE_CHECKING:
    import torch

Missing = Literal["nan", "zero", "error"]
_MISSING: tuple[str, ...] = get_args(Missing)
Int64s = NDArray[np.int64]

TENSORS = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "log_probs",
    "behavior_log_probs",
    "rewards",
    "advantages",
    "returns",
    "versions",
)
"""Keys of a padded batch, in order."""

ON_REQUEST = ("action_mask", "values", "token_rewards")
"""Per-token columns that a padded batch holds when asked for."""

UNKNOWN_VERSION = -1
"""What `versions` holds for a row whose policy version is not known."""


@dataclass(frozen=True)
class Ragged:
    """A list column as addresses: row i is `chunks[chunk[i]][start[i] : start[i] + length[i]]`.

    Attributes:
        chunks: flat value arrays, which Arrow owns and nobody writes to.
        chunk, start, length: [N] int64 each; a length of -1 is a null row.
    """

    chunks: tuple[NDArray[Any], ...]
    chunk: Int64s
    start: Int64s
    length: Int64s

    @staticmethod
    def from_arrow(column: pa.Array | pa.ChunkedArray, name: str | None = None) -> Ragged:
        """The addresses of a list or large_list column of numbers or booleans; no number is copied.

        Args:
            column: the rows.
            name: what to call the column in an error.

        Raises:
            ValidationError: an element inside a list is null.
        """
        arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        chunks, numbers, starts, lengths = [], [], [], []
        for number, array in enumerate(arrays):
            # `offsets` respects a slice and `values` does not, so the two fit together; null rows may
            # own values, so their length comes from the validity and not from the offsets.
            offsets = array.offsets.to_numpy().astype(np.int64)
            if array.flatten().null_count:
                raise ValidationError(
                    "an element inside a list is null", column=name, hint="store NaN, or mask the token"
                )
            chunks.append(_flat_values(array))
            starts.append(offsets[:-1])
            lengths.append(np.where(np.asarray(array.is_valid()), np.diff(offsets), -1))
            numbers.append(np.full(len(array), number, np.int64))
        empty = np.empty(0, np.int64)
        return Ragged(
            tuple(chunks),
            np.concatenate([empty, *numbers]),
            np.concatenate([empty, *starts]),
            np.concatenate([empty, *lengths]),
        )

    @staticmethod
    def absent(count: int) -> Ragged:
        """A column in which every row is null."""
        zeros = np.zeros(count, np.int64)
        return Ragged((), zeros, zeros, zeros - 1)

    def __len__(self) -> int:
        return len(self.length)

    def take(self, rows: Int64s) -> Ragged:
        """The rows at these positions, in this order; no value is copied."""
        return Ragged(self.chunks, self.chunk[rows], self.start[rows], self.length[rows])

    def row(self, i: int) -> NDArray[Any] | None:
        """Values of row i as a view, or None when the row is null."""
        if self.length[i] < 0:
            return None
        start = self.start[i]
        values: NDArray[Any] = self.chunks[self.chunk[i]][start : start + self.length[i]]
        return values


def _flat_values(array: pa.Array) -> NDArray[Any]:
    values = array.values
    if pa.types.is_boolean(values.type):  # bit-packed: it has no view as an array
        values = values.cast(pa.uint8())
    if values.null_count:  # only hidden behind null rows: the visible ones were checked
        values = values.fill_null(0)
    return values.to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]  # pyarrow is untyped


@dataclass(frozen=True)
class Rows:
    """What a batch is made from: the scalars of N rows and the addresses of their list columns.

    Attributes:
        ids: [N] names, for messages and for the batch itself.
        lengths: [N] int64, number of tokens.
        prompt_lengths: [N] int64, -1 where the split is not known.
        rewards: [N] float64.
        versions: [N] int64, UNKNOWN_VERSION where not known.
        columns: per-token list columns by name; one that is not there is null in every row.
        pads: value on padding positions of the columns that are not the row's own, by name.
        keys: [N] int64 hashes of the ids; seeded orders come from them.
    """

    ids: Sequence[str]
    lengths: Int64s
    prompt_lengths: Int64s
    rewards: NDArray[np.float64]
    versions: Int64s
    columns: Mapping[str, Ragged]
    pads: Mapping[str, float]
    keys: Int64s

    @staticmethod
    def from_arrow(table: pa.Table, pads: Mapping[str, float]) -> Rows:
        """Rows of a table that holds the scalars a batch needs and any list columns."""

        def integers(name: str, unknown: int) -> Int64s:
            column = table.column(name).fill_null(unknown)
            return column.to_numpy().astype(np.int64)  # type: ignore[no-any-return]  # pyarrow is untyped

        return Rows(
            ids=table.column("id").to_pylist(),
            lengths=integers("length", 0),
            prompt_lengths=integers("prompt_length", -1),
            rewards=table.column("reward").to_numpy(),
            versions=integers("version_id", UNKNOWN_VERSION),
            columns={
                f.name: Ragged.from_arrow(table.column(f.name), f.name)
                for f in table.schema
                if _holds_numbers(f.type)
            },
            pads=pads,
            keys=integers("id_hash", 0),
        )

    def take(self, rows: Int64s) -> Rows:
        """The rows at these positions, in this order."""
        return Rows(
            [self.ids[i] for i in rows],
            self.lengths[rows],
            self.prompt_lengths[rows],
            self.rewards[rows],
            self.versions[rows],
            {name: column.take(rows) for name, column in self.columns.items()},
            self.pads,
            self.keys[rows],
        )

    def column(self, name: str) -> Ragged:
        """The list column of that name, null in every row when it is not there."""
        found = self.columns.get(name)
        return Ragged.absent(len(self.ids)) if found is None else found


def _holds_numbers(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    element = kind.value_type
    is_one = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(check(element) for check in is_one)


SCALARS = ("id", "id_hash", "length", "prompt_length", "reward", "version_id")
"""Scalar columns that `Rows.from_arrow` reads."""


def pad(
    column: Ragged, width: int, fill: float, dtype: Any, *, null: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Right-padded rows, [B, width] of dtype; a null row stays `fill`, or takes its row of `null`."""
    out = np.full((len(column), width), fill, dtype)
    for i in range(len(column)):
        values = column.row(i)
        if values is not None:
            out[i, : len(values)] = values
        elif null is not None:
            out[i] = null[i]
    return out


def padded(
    rows: Rows, *, pad_token_id: int = 0, missing: Missing = "nan", extra: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """One padded batch, T the longest row of it.

    Args:
        rows: B rows.
        pad_token_id: what `input_ids` holds on padding.
        missing: what a float column holds on the valid positions of a row that does not have it: NaN
            (a log-prob of 0.0 would mean probability 1), zero, or an error. Padding is padding all the same.
        extra: more per-token columns, ours (`ON_REQUEST`) or the user's.

    Returns:
        The keys of TENSORS and `extra`: ids and attention_mask [B, T] int64; loss_mask, action_mask,
        log_probs, behavior_log_probs, advantages, returns and extras [B, T] float32; rewards [B] float32;
        versions [B] int64, UNKNOWN_VERSION where not known. Padding is pad_token_id, the pad value of a
        column of the user's own, else 0.

    Raises:
        ValidationError: a row has neither loss_mask nor a known split; a column is missing and
            `missing="error"`.
        InputError: an extra column is not a per-token column of the rows; `missing` is unknown.
    """
    if missing not in _MISSING:
        raise InputError(f"missing is {missing!r}, expected one of {', '.join(_MISSING)}")
    width = int(rows.lengths.max(initial=0))
    inside = np.arange(width) < rows.lengths[:, None]

    def floats(name: str) -> NDArray[Any]:
        column, fill = rows.column(name), rows.pads.get(name, 0)
        lacking = (column.length < 0) & (rows.lengths > 0)
        if not lacking.any():
            return pad(column, width, fill, np.float32)
        if missing == "error":
            i = int(lacking.argmax())
            raise ValidationError(
                "the row does not have it",
                row=i,
                id=rows.ids[i],
                column=name,
                hint='pass missing="nan", or leave such rows out with where=',
            )
        null = np.where(inside, np.float32(0 if missing == "zero" else np.nan), np.float32(fill))
        return pad(column, width, fill, np.float32, null=null)

    out: dict[str, NDArray[Any]] = {
        "input_ids": pad(rows.column("tokens"), width, pad_token_id, np.int64),
        "attention_mask": pad(rows.column("attention_mask"), width, 0, np.int64, null=inside),
        "loss_mask": _loss_mask(rows, width, inside),
        "log_probs": floats("log_probs"),
        "behavior_log_probs": floats("behavior_log_probs"),
        "rewards": rows.rewards.astype(np.float32),
        "advantages": floats("advantages"),
        "returns": floats("returns"),
        "versions": rows.versions.copy(),
    }
    for name in extra:
        if name == "action_mask":
            column = rows.column(name)
            out[name] = pad(column, width, 0, np.float32, null=out["loss_mask"])
        elif name in ON_REQUEST or (name in rows.columns and name in rows.pads):
            out[name] = floats(name)
        else:
            known = ", ".join(sorted({*ON_REQUEST, *rows.pads}))
            raise InputError(f"{name!r} is not a per-token column to add to a batch", hint=f"known: {known}")
    return out


def _loss_mask(rows: Rows, width: int, inside: NDArray[np.bool_]) -> NDArray[Any]:
    column = rows.column("loss_mask")
    underivable = (column.length < 0) & (rows.prompt_lengths < 0) & (rows.lengths > 0)
    if underivable.any():
        i = int(underivable.argmax())
        raise ValidationError(
            "neither loss_mask nor the split into prompt and response is known",
            row=i,
            id=rows.ids[i],
            column="loss_mask",
            hint="store the row with loss_mask, or with prompt_length and response_length",
        )
    response = inside & (np.arange(width) >= rows.prompt_lengths[:, None])
    return pad(column, width, 0, np.float32, null=response)


def padding_ratio(lengths: Int64s) -> float:
    """Padding / (B·T) of one padded batch; 0.0 when it is empty."""
    size = len(lengths) * int(lengths.max(initial=0))
    return 1 - int(lengths.sum()) / size if size else 0.0


def to_torch(arrays: Mapping[str, NDArray[Any]], device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Tensors over the same memory on the CPU, copies elsewhere."""
    import torch

    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
