"""Owns trajstore's own JSON lines as an export: every field of every row, read back as the same row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trajstore.export.selection import Selection
from trajstore.importers.trajstore_jsonl import write_line
from trajstore.schema import BY_NAME

HOLDS = frozenset(BY_NAME)


def write(selection: Selection, path: Path) -> None:
    """A file of lines; columns of the user's own have no field in Trajectory."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for batch in selection.batches():
            file.writelines(write_line(trajectory) + "\n" for trajectory in batch)


def text_of(value: Any, **options: Any) -> str:
    """A value as JSON in UTF-8, NaN and infinities bare as Python's json writes them."""
    text = json.dumps(value, ensure_ascii=False, **options)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can escape it, UTF-8 cannot hold it
        text = json.dumps(value, **options)
    return text
