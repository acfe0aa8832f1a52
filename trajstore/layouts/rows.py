"""Owns Rows and Lists, what batches are made from: scalars and addresses of N rows; no layout, no store.

Rows are trajectories, and say which columns a batch of them has; Lists are rows of any other list columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import InputError, LengthMismatchError, ValidationError
from trajstore.layouts.fields import Field, Options, dtypes_of
from trajstore.layouts.ragged import Int64s, Ragged, side_by_side, take_all

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
"""Keys of a padded batch of trajectories, in order."""

ON_REQUEST = ("action_mask", "values", "token_rewards")
"""Per-token columns that a batch of trajectories holds when asked for."""

READ = ("tokens", "attention_mask", "loss_mask", "log_probs", "behavior_log_probs", "advantages", "returns")
"""List columns that every batch of trajectories is made from."""

UNKNOWN_VERSION = -1
"""What `versions` holds for a row whose policy version is not known."""

SCALARS = ("id", "id_hash", "length", "prompt_length", "reward", "version_id")
"""Scalar columns that `Rows.from_arrow` reads."""


@dataclass(frozen=True)
class Rows:
    """Trajectories: the scalars of N rows and the addresses of their list columns.

    Attributes:
        ids: [N] names, for messages and for the batch itself.
        lengths: [N] int64, number of tokens.
        prompt_lengths: [N] int64, -1 where the split is not known.
        rewards: [N] float64.
        versions: [N] int64, UNKNOWN_VERSION where not known.
        columns: per-token list columns by name; one that is not there is null in every row.
        pads: value on padding positions of the columns that are not the row's own, by name.
        keys: [N] int64 hashes of the ids; seeded orders come from them.
        groups: [N] int64, the same number for rows of one group, -1 for a row of none; None when not read.
        suspects: columns in which some row is wrong: of another length than the trajectory, or without
            loss_mask and split. A batch looks for the row in these alone; None looks in all, once for all
            batches that are taken out of these rows.
    """

    ids: Sequence[str]
    lengths: Int64s
    prompt_lengths: Int64s
    rewards: NDArray[np.float64]
    versions: Int64s
    columns: Mapping[str, Ragged]
    pads: Mapping[str, float]
    keys: Int64s
    groups: Int64s | None = None
    suspects: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.suspects is None:
            suspects = {name for name, column in self.columns.items() if self._misfits(column).any()}
            if self._underivable().any():
                suspects.add("loss_mask")
            object.__setattr__(self, "suspects", frozenset(suspects))

    @staticmethod
    def from_arrow(
        table: pa.Table, pads: Mapping[str, float], columns: Mapping[str, Ragged] | None = None
    ) -> Rows:
        """Rows of a table that holds the scalars a batch needs, and its list columns or those given."""

        def integers(name: str, unknown: int) -> Int64s:
            column = table.column(name).fill_null(unknown)
            return column.to_numpy().astype(np.int64)  # type: ignore[no-any-return]  # pyarrow is untyped

        return Rows(
            ids=table.column("id").to_pylist(),
            lengths=integers("length", 0),
            prompt_lengths=integers("prompt_length", -1),
            rewards=table.column("reward").to_numpy(),
            versions=integers("version_id", UNKNOWN_VERSION),
            columns=_list_columns(table) if columns is None else columns,
            pads=pads,
            keys=integers("id_hash", 0),
            groups=group_codes(table.column("group_id")) if "group_id" in table.schema.names else None,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def _addresses(self) -> Int64s:
        return side_by_side(self.columns, len(self))

    def take(self, rows: Int64s) -> Rows:
        """The rows at these positions, in this order."""
        return Rows(
            [self.ids[i] for i in rows.tolist()],
            self.lengths[rows],
            self.prompt_lengths[rows],
            self.rewards[rows],
            self.versions[rows],
            take_all(self.columns, self._addresses, rows),
            self.pads,
            self.keys[rows],
            None if self.groups is None else self.groups[rows],
            self.suspects,
        )

    def column(self, name: str) -> Ragged:
        """The list column of that name, null in every row when it is not there.

        Raises:
            LengthMismatchError: a row of it is neither null nor as long as the trajectory.
        """
        found = self.columns.get(name)
        if found is None:
            return Ragged.absent(len(self))
        if name in self._suspected() and (misfits := self._misfits(found)).any():
            i = int(misfits.argmax())
            raise LengthMismatchError(
                f"it has {found.length[i]} values for {self.lengths[i]} tokens",
                row=i,
                id=self.ids[i],
                column=name,
            )
        return found

    def _suspected(self) -> frozenset[str]:
        return self.suspects or frozenset()

    def _misfits(self, column: Ragged) -> NDArray[np.bool_]:
        wrong: NDArray[np.bool_] = (column.length != self.lengths) & (column.length >= 0)
        return wrong

    def outputs(self, options: Options) -> dict[str, Field | NDArray[Any]]:
        """The fields and arrays of TENSORS and the extra columns.

        Raises:
            ValidationError: a row has neither loss_mask nor a known split; a column is missing and
                `missing="error"`.
            InputError: an extra column is not a per-token column of the rows.
        """
        kinds = dtypes_of(options)

        def floats(name: str) -> Field:
            column = self.column(name)
            if options.missing == "error":
                self._refuse_missing(name, column)
            null = 0.0 if options.missing == "zero" else np.nan
            return Field(column, kinds["float"], self.pads.get(name, 0), null)

        tokens = self.column("tokens")
        loss_mask = Field(self._loss_mask(), kinds["mask"], null=1, split=self.prompt_lengths)
        out: dict[str, Field | NDArray[Any]] = {
            "input_ids": Field(tokens, kinds["ids"], options.pad_token_id),
            "attention_mask": Field(self.column("attention_mask"), kinds["attention"], null=1),
            "loss_mask": loss_mask,
            "log_probs": floats("log_probs"),
            "behavior_log_probs": floats("behavior_log_probs"),
            "rewards": self.rewards.astype(np.float32),
            "advantages": floats("advantages"),
            "returns": floats("returns"),
            "versions": self.versions.copy(),
        }
        for name in options.extra:
            if name == "action_mask":
                column = self.column(name).or_else(loss_mask.column)
                out[name] = Field(column, kinds["mask"], null=1, split=self.prompt_lengths)
            elif name in ON_REQUEST or (name in self.columns and name in self.pads):
                out[name] = floats(name)
            else:
                known = ", ".join(sorted({*ON_REQUEST, *self.pads}))
                raise InputError(
                    f"{name!r} is not a per-token column to add to a batch", hint=f"known: {known}"
                )
        return out

    def _refuse_missing(self, name: str, column: Ragged) -> None:
        lacking = (column.length < 0) & (self.lengths > 0)
        if lacking.any():
            i = int(lacking.argmax())
            raise ValidationError(
                "the row does not have it",
                row=i,
                id=self.ids[i],
                column=name,
                hint='pass missing="nan", or leave such rows out with where=',
            )

    def _loss_mask(self) -> Ragged:
        column = self.column("loss_mask")
        if "loss_mask" in self._suspected() and (underivable := self._underivable()).any():
            i = int(underivable.argmax())
            raise ValidationError(
                "neither loss_mask nor the split into prompt and response is known",
                row=i,
                id=self.ids[i],
                column="loss_mask",
                hint="store the row with loss_mask, or with prompt_length and response_length",
            )
        return column

    def _underivable(self) -> NDArray[np.bool_]:
        unknown: NDArray[np.bool_] = (self.prompt_lengths < 0) & (self.lengths > 0)
        column = self.columns.get("loss_mask")
        return unknown if column is None else unknown & (column.length < 0)


@dataclass(frozen=True)
class Lists:
    """Rows of any list columns, each with a dtype and a pad value: ILQL sets, tables of others.

    Attributes:
        ids: [N] names.
        lengths: [N] int64, what plans, buckets and token budgets go by.
        keys: [N] int64 hashes of the ids; seeded orders come from them.
        columns: list columns by name. A null row of one is an empty one.
        dtypes: of the outputs, by name; a column that is not named keeps its own.
        pads: value on padding, by name; 0 when not named.
        scalar_columns: [N] arrays by name, the outputs with one value a row.
        prompt_lengths: [N] int64, -1 where not known, what `prompt_response` splits by; none given: -1.
        aligned: columns whose rows are all as long as `lengths`: they are cut by max_length and share
            cu_seqlens, the others have widths and cu_seqlens of their own. None looks for itself.
    """

    ids: Sequence[str]
    lengths: Int64s
    keys: Int64s
    columns: Mapping[str, Ragged]
    dtypes: Mapping[str, Any] = field(default_factory=dict)
    pads: Mapping[str, float] = field(default_factory=dict)
    scalar_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    prompt_lengths: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    aligned: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt_lengths):
            object.__setattr__(self, "prompt_lengths", np.full(len(self.lengths), -1, np.int64))
        if self.aligned is None:
            same = (n for n, column in self.columns.items() if (column.length.clip(0) == self.lengths).all())
            object.__setattr__(self, "aligned", frozenset(same))

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def _addresses(self) -> Int64s:
        return side_by_side(self.columns, len(self))

    def take(self, rows: Int64s) -> Lists:
        """The rows at these positions, in this order."""
        return Lists(
            [self.ids[i] for i in rows.tolist()],
            self.lengths[rows],
            self.keys[rows],
            take_all(self.columns, self._addresses, rows),
            self.dtypes,
            self.pads,
            {name: values[rows] for name, values in self.scalar_columns.items()},
            self.prompt_lengths[rows],
            self.aligned,
        )

    def outputs(self, options: Options) -> dict[str, Field | NDArray[Any]]:
        """Every list column, then those of scalars; columns, pads and dtypes of the options do not apply."""
        out: dict[str, Field | NDArray[Any]] = {}
        for name, column in self.columns.items():
            own = np.dtype(np.float32) if column.dtype is None else column.dtype
            dtype = np.dtype(self.dtypes.get(name, own))
            aligned = self.aligned is not None and name in self.aligned
            out[name] = Field(column, dtype, self.pads.get(name, 0), aligned=aligned)
        return out | {name: values.copy() for name, values in self.scalar_columns.items()}


def group_codes(names: pa.ChunkedArray) -> Int64s:
    """The same number for rows of one group, -1 for a row of none; see `Rows.groups`."""
    codes = names.combine_chunks().dictionary_encode().indices.fill_null(-1)
    return codes.to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]  # as above


def _list_columns(table: pa.Table) -> dict[str, Ragged]:
    return {
        f.name: Ragged.from_arrow(table.column(f.name), f.name)
        for f in table.schema
        if _holds_numbers(f.type)
    }


def _holds_numbers(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    element = kind.value_type
    is_one = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(check(element) for check in is_one)
