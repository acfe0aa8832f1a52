"""Owns AReaL's dumps: text JSON lines of `dump_to_file`, and its padded training batch as JSON.

Of a dumped line `head_version` is the minimum over prompt tokens too, where it is -1, and both versions are
those of the row's whole batch; `prompt_len` is wrong for several turns. So the versions are a span, or only
the newest, in metadata, and no split is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.importers.head import Format, Head, told_by
from trajstore.importers.records import Imported, ImportOptions, Record, read_records, require_object
from trajstore.importers.rows import (
    Origin,
    convert,
    elements,
    rest,
    reward_fields,
    segments,
    text,
    version_fields,
)  # fmt: skip
from trajstore.trajectory import Trajectory, TrajectoryStatus


def read_jsonl(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """Text rollouts, one file a task: `{task_id, sample_idx, head_version, tail_version, reward, ...}`."""
    origin = Origin.of("areal", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        known = int(data["head_version"]) >= 0
        return [
            Trajectory(
                id=origin.id(f"{data['task_id']}/{data['sample_idx']}"),
                group_id=origin.group(data["task_id"]),
                prompt=text(data["prompt"]),
                response=text(data["completion"]),
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(data, "prompt", "completion", "reward"),
                source=origin.source,
                **reward_fields(data["reward"]),
                **(version_fields(data["head_version"], data["tail_version"]) if known else {}),
            )
        ]

    yield from convert(read_records(path, options), origin, options, build)


def read_batch(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """A padded batch as one JSON object: `input_ids`, `attention_mask`, `loss_mask`, `logprobs`, `versions`.

    All are full-length, [B, T]; `versions` is -1 on the prompt and on padding, so it gives exact segments.
    """
    origin = Origin.of("areal-batch", path, options)

    def rows(record: Record) -> Iterator[Record]:
        yield from elements(path, range(len(batch["input_ids"])), record.bytes_read)

    def build(index: Any, number: int) -> list[Trajectory]:
        length = int(np.sum(batch["attention_mask"][index]))
        column = {k: v[index] for k, v in batch.items() if isinstance(v, list) and len(v) == count}
        mask = np.asarray(column["loss_mask"][:length])
        prompt = int(mask.argmax()) if mask.any() else length
        used = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards", "seqlens")
        versions = column.get("versions")
        return [
            Trajectory(
                id=origin.id(index),
                tokens=column["input_ids"][:length],
                prompt_length=prompt,
                response_length=length - prompt,
                loss_mask=mask,
                behavior_log_probs=column["logprobs"][:length] if "logprobs" in column else [],
                version_segments=[] if versions is None else segments(np.asarray(versions[:length])),
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(column, *used),
                source=origin.source,
                **reward_fields(column.get("rewards")),
            )
        ]

    for record in read_records(path):
        batch = require_object(record)
        count = len(batch["input_ids"])
        yield from convert(rows(record), origin, options, build)


def _is_batch(head: Head) -> str | None:
    keys = ("input_ids", "attention_mask", "loss_mask")
    return f"has lists {', '.join(map(repr, keys))}" if head.lists(*keys) else None


FORMATS = (
    Format("areal", told_by("json", "task_id", "sample_idx", "head_version", "tail_version"), read_jsonl),
    Format("areal-batch", _is_batch, read_batch),
)
