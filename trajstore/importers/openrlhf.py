"""Owns OpenRLHF's batch-inference lines, `{input, output, reward?}`: text only, no version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trajstore.importers.head import Format, told_by
from trajstore.importers.records import Imported, ImportOptions, read_records
from trajstore.importers.rows import Origin, convert, grouped, rest, reward_fields, text
from trajstore.trajectory import Trajectory, TrajectoryStatus


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """Generations, with a reward once the reward model has been over them; equal inputs are a group."""
    origin = Origin.of("openrlhf", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        prompt = text(data["input"])
        group, how = grouped(origin, prompt, options)
        return [
            Trajectory(
                id=origin.id(number),
                group_id=group,
                prompt=prompt,
                response=text(data["output"]),
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(data, "input", "output", "reward", group_by=how),
                source=origin.source,
                **reward_fields(data.get("reward")),
            )
        ]

    yield from convert(read_records(path, options), origin, options, build)


FORMATS = (Format("openrlhf", told_by("json", "input", "output", but=("score", "step")), read),)
