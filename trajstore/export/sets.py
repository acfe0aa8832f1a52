"""Owns the sets for trainers as files: what trajstore.offline builds, with its provenance in the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trajstore.errors import InputError
from trajstore.export.selection import Selection
from trajstore.layouts import Ragged
from trajstore.offline import flat, ilql_dataset
from trajstore.offline.ilql_set import METADATA_KEY
from trajstore.offline.ppo import ppo_dataset
from trajstore.offline.preference import PreferenceSet, kto_labels, preference_pairs, sft_rows


def ilql(selection: Selection, path: Path) -> None:
    """An ILQL set; `ILQLDataset(pyarrow.parquet.read_table(path))` is it again."""
    _ends_with(path, ".parquet")
    made = ilql_dataset(selection.scan)
    pq.write_table(made.table, path)
    _told(selection, len(made), made.report.dropped)


def ppo(selection: Selection, path: Path) -> None:
    """PPO elements, the fields of PPORLBatch as list columns without padding, and `id`."""
    _ends_with(path, ".parquet")
    made = ppo_dataset(selection.scan, log_probs=selection.options.log_probs)
    columns = {"id": pa.array(made.lists.ids, pa.string())}
    columns |= {name: _lists(column) for name, column in made.lists.columns.items()}
    said = {
        "kind": "ppo",
        "source": repr(selection.scan),
        "snapshot": selection.scan.snapshot,
        "log_probs": selection.options.log_probs,
        "dropped": made.dropped,
    }
    pq.write_table(pa.table(columns, metadata={METADATA_KEY: json.dumps(said)}), path)
    _told(selection, len(made), made.dropped)


def dpo(selection: Selection, path: Path) -> None:
    """Pairs of a group."""
    asked = selection.options
    made = preference_pairs(selection.scan, pairing=asked.pairing, margin=asked.margin)
    _written(selection, made, path)


def kto(selection: Selection, path: Path) -> None:
    """Rows with a label."""
    if selection.options.min_reward is None:
        raise InputError("kto needs min_reward, from which on a row is good", hint="--min-reward 0.5")
    _written(selection, kto_labels(selection.scan, desirable=selection.options.min_reward), path)


def sft(selection: Selection, path: Path) -> None:
    """Rows worth imitating."""
    asked = selection.options
    _written(selection, sft_rows(selection.scan, min_reward=asked.min_reward, top=asked.top), path)


def _written(selection: Selection, made: PreferenceSet, path: Path) -> None:
    _ends_with(path, ".parquet", ".jsonl")
    made.write(path)
    _told(selection, len(made), made.dropped)


def _ends_with(path: Path, *suffixes: str) -> None:
    if path.suffix not in suffixes:
        raise InputError(f"{path.name} does not end with {' or '.join(suffixes)}")


def _told(selection: Selection, rows: int, dropped: Mapping[str, int]) -> None:
    selection.rows = rows
    selection.dropped = Counter(dict(dropped))
    selection.report(rows, rows)


def _lists(column: Ragged) -> pa.ListArray:
    rows = [column.row(i) for i in range(len(column))]
    kind = np.float32 if column.dtype is None else column.dtype
    values = np.concatenate([np.zeros(0, kind), *(row for row in rows if row is not None)])
    return flat.lists(values, column.length.clip(0))
