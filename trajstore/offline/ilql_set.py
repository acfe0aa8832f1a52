"""Owns ILQLDataset: derived rows in Arrow columns, as elements, batches and a source of rows; builds nothing.

Axis letters: B rows, A actions, S = A + 1 states of a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trajstore import layouts, plan
from trajstore.errors import SchemaError
from trajstore.layouts import Lists, Ragged
from trajstore.offline.elements import ILQLBatch, ILQLElement, ILQLSeq2SeqBatch, ILQLSeq2SeqElement
from trajstore.offline.flat import Bools, Float64s, Int64s, lists
from trajstore.offline.scaling import ReturnScale
from trajstore.offline.windows import Int32s, last_of
from trajstore.selection import seeded_keys

if TYPE_CHECKING:
    import torch

METADATA_KEY = b"trajstore.offline"
"""Key of the schema metadata that says how a set was made."""

PADS = {"terminals": 1}
"""Pad values that are not 0; `input_ids` and `decoder_input_ids` have the set's own."""

LISTS = (
    "input_ids",
    "attention_mask",
    "decoder_input_ids",
    "rewards",
    "states_ixs",
    "actions_ixs",
    "dones",
    "terminals",
    "action_mask",
)
"""List columns a set may have, in the order of the elements' fields."""


@dataclass(frozen=True)
class Report:
    """What became of the rows.

    Attributes:
        rows_in, rows_out: rows before and after.
        dropped: rows left out, by reason.
        truncated: rows of the set that lost tokens to max_length.
        termination_unknown: rows of the set that end because `terminated` is null, not because it is true.
        scale: the statistics of the returns.
    """

    rows_in: int
    rows_out: int
    dropped: Mapping[str, int]
    truncated: int
    termination_unknown: int
    scale: ReturnScale

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for the metadata of a file."""
        return {
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": dict(self.dropped),
            "truncated": self.truncated,
            "termination_unknown": self.termination_unknown,
            "scale": self.scale.to_dict(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`."""
        scale = {name: value for name, value in data["scale"].items() if name != "ddof"}
        return Report(**{**data, "scale": ReturnScale(**scale)})


@dataclass
class Part:
    """Derived rows of one block, still as flat arrays.

    Attributes:
        batch: the stored rows they come from, one each.
        inputs, attention, decoder: list columns; attention None = ones, decoder None = a causal set.
        counts: [B] actions of each row.
        rewards: [A] float32.
        actions, states: [A] and [A + B] int32.
        terminal: [B] the last state is the end of the episode.
        action_mask: [A] int8, None for trlX, which has no such thing.
        last_reward, total: [B] float64 reward of the last action and of all actions.
        dense: [B] rewards per token were given.
        groups: [B] code of the row's group, -1 without one.
        statistics: [B] mean and deviation that the rewards were scaled by.
    """

    batch: pa.RecordBatch
    inputs: pa.ListArray
    attention: pa.ListArray | None
    decoder: pa.ListArray | None
    counts: Int64s
    rewards: NDArray[np.float32]
    actions: Int32s
    states: Int32s
    terminal: Bools
    action_mask: NDArray[np.int8] | None
    last_reward: Float64s
    total: Float64s
    dense: Bools
    groups: Int64s
    statistics: tuple[Float64s, Float64s] | None = None

    def columns(self) -> dict[str, pa.Array]:
        """The columns of the set."""
        states = self.counts + 1
        last = last_of(states)
        goes_on = np.ones(len(self.states), np.int8)
        goes_on[last] = ~self.terminal
        length = pc.list_value_length(self.inputs)
        if self.decoder is not None:
            length = pc.add(length, pc.list_value_length(self.decoder))
        out = {name: self.batch.column(name) for name in ("id", "id_hash")}
        if "group_id" in self.batch.schema.names:
            out["group_id"] = self.batch.column("group_id")
        out |= {"length": length, "input_ids": self.inputs}
        if self.attention is not None:
            out["attention_mask"] = self.attention
        if self.decoder is not None:
            out["decoder_input_ids"] = self.decoder
        out |= {
            "rewards": lists(self.rewards, self.counts),
            "states_ixs": lists(self.states, states),
            "actions_ixs": lists(self.actions, self.counts),
            "dones": lists(goes_on, states),
        }
        if self.action_mask is not None:
            terminals = np.zeros(len(self.states), np.int8)
            terminals[last] = self.terminal
            out["terminals"] = lists(terminals, states)
            out["action_mask"] = lists(self.action_mask, self.counts)
        if self.statistics is not None:
            out["return_mean"], out["return_std"] = map(pa.array, self.statistics)
        return out


def assemble(
    parts: Sequence[Part], report: Report, provenance: Mapping[str, Any], pad_token_id: int
) -> ILQLDataset:
    """The set of all parts, in order; an empty one keeps its columns."""
    said = {"kind": "ilql", "pad_token_id": pad_token_id, **provenance, "report": report.to_dict()}
    batches = [pa.RecordBatch.from_pydict(part.columns()) for part in parts]
    table = pa.Table.from_batches(batches) if batches else _empty(provenance)
    return ILQLDataset(table.replace_schema_metadata({METADATA_KEY: json.dumps(said)}))


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


def _empty(provenance: Mapping[str, Any]) -> pa.Table:
    """The columns of a set without rows."""
    ours = {"terminals": pa.int8(), "action_mask": pa.int8()}
    kinds = {
        "input_ids": pa.int32(),
        **({"decoder_input_ids": pa.int32()} if provenance["architecture"] == "seq2seq" else {}),
        "rewards": pa.float32(),
        "states_ixs": pa.int32(),
        "actions_ixs": pa.int32(),
        "dones": pa.int8(),
        **({} if provenance["compat"] == "trlx" else ours),
    }
    scalars = {"id": pa.string(), "id_hash": pa.int64(), "length": pa.int32()}
    return pa.schema(scalars | {name: _list(kind) for name, kind in kinds.items()}).empty_table()


class ILQLDataset:
    """ILQL data: one row a trajectory, in Arrow list columns.

    Args:
        table: columns as `ilql_dataset` makes them; a set read back from a file is one.

    Raises:
        SchemaError: the table does not say that it is an ILQL set.
    """

    def __init__(self, table: pa.Table) -> None:
        metadata = table.schema.metadata or {}
        if METADATA_KEY not in metadata:
            raise SchemaError("the table is not an ILQL set", hint="make one with ilql_dataset(scan)")
        self.table = table
        self.provenance: dict[str, Any] = json.loads(metadata[METADATA_KEY])
        self.report = Report.from_dict(self.provenance["report"])
        names = table.schema.names
        self.is_seq2seq = "decoder_input_ids" in names

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        kind = "seq2seq" if self.is_seq2seq else "causal"
        return f"ILQLDataset({len(self)} {kind} rows, {self.num_actions} actions)"

    @property
    def num_actions(self) -> int:
        """Actions of all rows."""
        return int(pc.sum(pc.list_value_length(self.table.column("actions_ixs"))).as_py() or 0)

    @property
    def pad_token_id(self) -> int:
        """What `input_ids` and `decoder_input_ids` hold on padding."""
        return int(self.provenance["pad_token_id"])

    def __getitem__(self, i: int) -> ILQLElement | ILQLSeq2SeqElement:
        """One row as int64 and float32 tensors of its own.

        Raises:
            IndexError: there is no such row.
        """
        fields = self._padded(np.array([range(len(self))[i]]))
        made = {name: tensor[0] for name, tensor in fields.items()}
        return ILQLSeq2SeqElement(**made) if self.is_seq2seq else ILQLElement(**made)

    def batch(self, rows: Sequence[int] | Int64s | None = None) -> ILQLBatch | ILQLSeq2SeqBatch:
        """These rows (all of them by default), right-padded, each field to its own longest row."""
        chosen = np.arange(len(self)) if rows is None else np.asarray(rows, np.int64)
        return self.as_batch(self._padded(chosen))

    def as_batch(self, tensors: Mapping[str, Any]) -> ILQLBatch | ILQLSeq2SeqBatch:
        """The fields of a batch that a TrajectoryLoader made of this set, under their names."""
        fields = {name: tensors[name] for name in LISTS if name in tensors}
        return ILQLSeq2SeqBatch(**fields) if self.is_seq2seq else ILQLBatch(**fields)

    def rows(self, columns: Sequence[str] = ()) -> Lists:
        """The row source that loaders take; every column of the elements is in it."""
        return self._lists

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        bucket_window: int | None = None,
    ) -> Iterator[ILQLBatch | ILQLSeq2SeqBatch]:
        """One epoch of batches; the order depends on the seed, the epoch and the rows' ids.

        Args:
            batch_size: rows of a batch.
            shuffle: another order each epoch.
            drop_last: leaves out a last batch that is smaller.
            bucket_window: see `trajstore.plan.Recipe`.

        Raises:
            InputError: a size is below 1.
        """
        keys = None
        if shuffle:
            keys = seeded_keys(seeded_keys(self._lists.keys, seed).view(np.int64), epoch)
        tail: plan.Tail = "drop" if drop_last else "keep"
        recipe = plan.Recipe(batch_size=batch_size, bucket_window=bucket_window, tail=tail)
        for rows in plan.plan(self._lists.lengths, recipe, keys=keys):
            yield self.batch(rows)

    def _padded(self, rows: Int64s) -> dict[str, torch.Tensor]:
        return layouts.to_torch(layouts.padded(self._lists.take(rows)).arrays)

    @cached_property
    def _lists(self) -> Lists:
        table = self.table
        columns = {
            name: Ragged.from_arrow(table.column(name), name) for name in LISTS if name in table.schema.names
        }
        if "attention_mask" not in columns:
            lengths = columns["input_ids"].length
            zeros, ones = np.zeros(len(lengths), np.int64), np.ones(int(lengths.max(initial=0)), np.int8)
            columns["attention_mask"] = Ragged((ones,), zeros, zeros, lengths)  # all rows share the ones
        pads = dict.fromkeys(("input_ids", "decoder_input_ids"), self.pad_token_id) | PADS
        return Lists(
            ids=table.column("id").to_pylist(),
            lengths=table.column("length").to_numpy().astype(np.int64),
            keys=table.column("id_hash").to_numpy(),
            columns={name: columns[name] for name in LISTS if name in columns},
            dtypes={name: np.float32 if name == "rewards" else np.int64 for name in LISTS},
            pads=pads,
            aligned=frozenset(),  # a row is never cut: its indices would point past the end
        )
