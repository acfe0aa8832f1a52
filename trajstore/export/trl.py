"""Owns TRL's logged completions as one Parquet file: `step, prompt, completion, advantage`, rewards and `id`.

TRL has a column for each reward function and takes their sum. A row whose metadata names its `rewards`, as
the importer and the hook do, has them in columns of those names when their sum is its reward; any other has
its reward in the column `reward`. An advantage is one number a completion: that of its trained tokens when
they all have the same.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trajstore.export.selection import Selection, need_text

HOLDS = frozenset({"id", "prompt", "response", "reward", "advantages", "metadata"})

_BEFORE = {"step": pa.int64(), "prompt": pa.string(), "completion": pa.string()}
_BEHIND = {"advantage": pa.float64(), "id": pa.string()}
_TOLD = frozenset({"step", "rewards", "reward_is", "group_by", "advantage"})
"""Keys of metadata that are in the file, or follow from it."""


def write(selection: Selection, path: Path) -> None:
    """One file; `step` is the training step in the metadata, null where none is.

    Raises:
        ValidationError: a row has tokens and no text.
    """
    names = _functions(selection)
    schema = pa.schema(_BEFORE | dict.fromkeys(names, pa.float64()) | _BEHIND)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in selection.batches():
            need_text(batch, "trl")
            table = batch.to_arrow()
            kept = [_parsed(text) for text in table["metadata"].to_pylist()]
            rewards = [_rewards(*row) for row in zip(kept, table["reward"].to_pylist(), strict=True)]
            for metadata, found in zip(kept, rewards, strict=True):
                if not _TOLD.issuperset(metadata) or ("rewards" in metadata and metadata["rewards"] != found):
                    selection.lose("metadata")
            columns = {
                "step": pa.array([_step(metadata) for metadata in kept], pa.int64()),
                "prompt": table["prompt"],
                "completion": table["response"],
                **{name: pa.array([r.get(name) for r in rewards], pa.float64()) for name in names},
                "advantage": pa.array(_advantages(table, kept, selection), pa.float64()),
                "id": table["id"],
            }
            writer.write_table(pa.table(columns, schema=schema))


def _functions(selection: Selection) -> list[str]:
    """The columns of rewards that any row has, in the order in which the files have them."""
    names: dict[str, None] = {}
    for _, table in selection.scan.pieces(["metadata", "reward"]):
        for text, reward in zip(table["metadata"].to_pylist(), table["reward"].to_pylist(), strict=True):
            names |= dict.fromkeys(_rewards(_parsed(text), reward))
    return list(names) or ["reward"]


def _rewards(metadata: dict[str, Any], reward: float) -> dict[str, float]:
    """What goes into the columns of rewards of one row."""
    named = metadata.get("rewards")
    if isinstance(named, dict) and named and named.keys().isdisjoint(_BEFORE.keys() | _BEHIND.keys()):
        numbers = [value for value in named.values() if _is_number(value)]
        given = [value for value in numbers if not math.isnan(value)]
        total = sum(given) if given else math.nan
        alike = math.isclose(total, reward, rel_tol=1e-6) or (math.isnan(total) and math.isnan(reward))
        if len(numbers) == len(named) and alike:
            return named
    return {"reward": reward}


def _parsed(metadata: str | None) -> dict[str, Any]:
    found = json.loads(metadata) if metadata else {}
    return found if isinstance(found, dict) else {}


def _step(metadata: dict[str, Any]) -> int | None:
    step = metadata.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _advantages(table: pa.Table, kept: list[dict[str, Any]], selection: Selection) -> list[float | None]:
    """One a row; where there are no tokens to hold it, the importer leaves it in the metadata."""
    found: list[float | None] = []
    names = ("advantages", "loss_mask", "prompt_length")
    for row, metadata in zip(table.select(names).to_pylist(), kept, strict=True):
        if row["advantages"] is None:
            found.append(metadata.get("advantage") if _is_number(metadata.get("advantage")) else None)
            continue
        values = np.array(row["advantages"], np.float32)
        mask = row["loss_mask"]
        if mask is not None:
            values = values[np.array(mask, bool)]
        elif row["prompt_length"] is not None:
            values = values[row["prompt_length"] :]
        one = len(values) > 0 and bool((values == values[0]).all())
        if not one:
            selection.lose("advantages")
        found.append(float(values[0]) if one else None)
    return found
