"""Owns the folder that Hugging Face `datasets` loads: Parquet shards of all columns; knows no `datasets`.

`datasets.load_dataset(FOLDER)` gives one split, `train`; polars, DuckDB and pandas read the shards as they
are. `trajstore import FOLDER` gives the same rows again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trajstore.export.selection import Selection
from trajstore.schema import BY_NAME

HOLDS = frozenset(BY_NAME)

SHARD_TOKENS = 1 << 26
"""Tokens from which on a shard is full: some hundred MB."""


def write(selection: Selection, path: Path) -> None:
    """`data/train-00000.parquet` and on; columns that a store stamps are left out."""
    full = selection.scan.schema
    kept = [f for f in full if f.name not in BY_NAME or not BY_NAME[f.name].stamp]
    said = {"trajstore": json.dumps({"scan": repr(selection.scan), "snapshot": selection.scan.snapshot})}
    schema = pa.schema(kept, metadata=said)
    selection.holds = HOLDS | set(full.names)
    (path / "data").mkdir(parents=True)
    shard, tokens = 0, 0
    writer = _shard(path, shard, schema)
    try:
        for batch in selection.batches():
            if tokens >= SHARD_TOKENS:
                writer.close()
                shard, tokens = shard + 1, 0
                writer = _shard(path, shard, schema)
            writer.write_table(batch.to_arrow().select(schema.names).replace_schema_metadata(said))
            tokens += batch.num_tokens
    finally:
        writer.close()


def _shard(path: Path, number: int, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path / "data" / f"train-{number:05d}.parquet", schema, compression="zstd")
