"""Owns TRL's logged completions: a Parquet file a step, text or chat, one column for each reward function.

Which weights the functions had is not in the file: the reward is their sum, as with TRL's default of 1 each,
and metadata says so; a function that gave nothing for a row is left out of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trajstore.importers.head import Format, Head
from trajstore.importers.records import Imported, ImportOptions
from trajstore.importers.rows import NOT_KNOWN, Origin, chat, convert, grouped, rest, text
from trajstore.importers.tables import read_rows
from trajstore.trajectory import Trajectory, TrajectoryStatus

_FIXED = ("step", "prompt", "completion", "advantage")


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """The completions of one file; rows of the same prompt are a group."""
    origin = Origin.of("trl", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        prompt = text(data["prompt"])
        scores = {k: v for k, v in data.items() if k not in _FIXED and isinstance(v, float | int)}
        rewards = {name: v for name, v in scores.items() if not isinstance(v, bool)}
        given = [value for value in rewards.values() if not math.isnan(value)]
        group, how = grouped(origin, prompt, options)
        said = "the sum of them, each with weight 1" if len(given) > 1 else None
        return [
            Trajectory(
                id=origin.id(number),
                group_id=group,
                prompt=prompt,
                response=text(data["completion"]),
                messages=chat(data["prompt"], data["completion"]),
                reward=float(sum(given)) if given else NOT_KNOWN,
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(
                    data, "prompt", "completion", *rewards, rewards=rewards, reward_is=said, group_by=how
                ),
                source=origin.source,
            )
        ]

    yield from convert(read_rows(path, options), origin, options, build)


def _is_completions(head: Head) -> str | None:
    if head.container in ("parquet", "json") and head.has("step", "prompt", "completion", "advantage"):
        return "has 'step', 'prompt', 'completion' and 'advantage'"
    return None


FORMATS = (Format("trl", _is_completions, read),)
