"""Owns verl's rollout lines, `{input, output, gts, score, step, ...}`: text and scores, no token ids.

Keys of a row's metadata go to the line's top, where verl has its reward extras. `step` is the training step
in the metadata; null where none is, since a policy version is not one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trajstore.export.jsonl import text_of
from trajstore.export.selection import Selection, need_text
from trajstore.trajectory import Trajectory

HOLDS = frozenset({"id", "group_id", "prompt", "response", "reward", "metadata"})

_OWN = ("input", "output", "gts", "score", "step", "request_id", "uid")


def write(selection: Selection, path: Path) -> None:
    """A file of lines in the rows' order.

    Raises:
        ValidationError: a row has tokens and no text.
    """
    number = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for batch in selection.batches():
            need_text(batch, "verl")
            for trajectory in batch:
                file.write(text_of(_line(trajectory, number)) + "\n")
                number += 1


def _line(t: Trajectory, number: int) -> dict[str, Any]:
    more = t.metadata or {}
    line = {
        "input": t.prompt,
        "output": t.response,
        "gts": more.get("gts"),
        "score": t.reward,
        "step": more.get("step"),
        "request_id": more.get("request_id", t.id),
    }
    uid = more.get("uid") or (None if t.group_id is None else f"{t.group_id}_{number}_0")
    if uid is not None:
        line["uid"] = uid
    return line | {name: value for name, value in more.items() if name not in _OWN}
