"""Owns TRL's logged completions as one Parquet file: `step, prompt, completion, reward, advantage` and `id`.

TRL has a column for each reward function; a store has one reward. An advantage is one number a completion:
that of its trained tokens when they all have the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trajstore.export.selection import Selection, need_text

HOLDS = frozenset({"id", "prompt", "response", "reward", "advantages"})

_SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "id": pa.string(),
    }
)


def write(selection: Selection, path: Path) -> None:
    """One file; `step` is the training step in the metadata, null where none is.

    Raises:
        ValidationError: a row has tokens and no text.
    """
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        for batch in selection.batches():
            need_text(batch, "trl")
            table = batch.to_arrow()
            columns = {
                "step": pa.array([_step(text) for text in table["metadata"].to_pylist()], pa.int64()),
                "prompt": table["prompt"],
                "completion": table["response"],
                "reward": table["reward"],
                "advantage": pa.array(_advantages(table, selection), pa.float64()),
                "id": table["id"],
            }
            writer.write_table(pa.table(columns, schema=_SCHEMA))


def _step(metadata: str | None) -> int | None:
    step = json.loads(metadata).get("step") if metadata else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _advantages(table: pa.Table, selection: Selection) -> list[float | None]:
    found: list[float | None] = []
    names = ("advantages", "loss_mask", "prompt_length")
    for row in table.select(names).to_pylist():
        if row["advantages"] is None:
            found.append(None)
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
