"""Owns store → others' files: the table of formats, and that a file is there whole or not at all.

To add one: a module beside this one with `write(selection, path)`, its line in the table, a test that reads
the result with what reads it elsewhere and imports it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trajstore.errors import InputError, StoreExistsError
from trajstore.export import atif, hf, jsonl, sets, slime, trl, verl
from trajstore.export.selection import DEFAULTS, Selection, SetOptions
from trajstore.store import Scan
from trajstore.store.aside import sweep_aside, workplace
from trajstore.store.disk import settle

__all__ = ["FORMATS", "Exported", "Format", "SetOptions", "export"]


class Format(NamedTuple):
    """One format of files.

    Attributes:
        write: makes the file or folder of a selection at a path.
        holds: columns that it has a place for; None for sets made for a trainer, which hold what that needs.
        makes: what it is, in a few words.
    """

    write: Callable[[Selection, Path], None]
    holds: frozenset[str] | None
    makes: str


FORMATS: Mapping[str, Format] = {
    "jsonl": Format(jsonl.write, jsonl.HOLDS, "Trajectory.to_dict() a line; holds everything"),
    "hf": Format(hf.write, hf.HOLDS, "folder for datasets.load_dataset, all columns"),
    "verl": Format(verl.write, verl.HOLDS, "verl's rollout lines: text and scores"),
    "slime": Format(slime.write, slime.HOLDS, "folder of slime's rollout_data/ and train_data/, .pt"),
    "trl": Format(trl.write, trl.HOLDS, "TRL's completions as Parquet: text, reward, advantage"),
    "atif": Format(atif.write, atif.HOLDS, "folder of ATIF trajectories, one a row"),
    "ilql": Format(sets.ilql, None, "ILQL rows as Parquet"),
    "ppo": Format(sets.ppo, None, "PPO elements as Parquet"),
    "dpo": Format(sets.dpo, None, "pairs of a group, prompt/chosen/rejected; .parquet or .jsonl"),
    "kto": Format(sets.kto, None, "prompt/completion/label by --min-reward; .parquet or .jsonl"),
    "sft": Format(sets.sft, None, "prompt/completion by --min-reward or --top; .parquet or .jsonl"),
}


@dataclass(frozen=True)
class Exported:
    """What an export did.

    Attributes:
        path: the file or folder that was made.
        rows: rows in it.
        files, bytes: how many files, and their size.
        left_behind: columns that the format has no place for: of how many rows a value was left behind.
        dropped: rows that a set leaves out, by reason.
    """

    path: Path
    rows: int
    files: int
    bytes: int
    left_behind: Mapping[str, int]
    dropped: Mapping[str, int]


def export(
    scan: Scan,
    out: str | Path,
    format: str,
    *,
    options: SetOptions = DEFAULTS,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Writes a scan's rows as a file or folder of another program; see FORMATS.

    It is written aside, synced and moved into place when it is whole; rows are read as they are written,
    some at a time (the sets for trainers are made in memory).

    Args:
        scan: the rows, in their order.
        out: a path at which there is nothing yet.
        format: a name of FORMATS.
        options: for the sets.
        report: called with rows done and all rows.

    Raises:
        InputError: there is no such format; a set asks for an option, or for another file name.
        StoreExistsError: there is something at `out`.
        ValidationError: the format cannot hold a row, which is named.
    """
    if format not in FORMATS:
        raise InputError(f"format is {format!r}, expected one of {', '.join(FORMATS)}")
    if str(out).startswith("s3://"):
        raise InputError(f"{out} is not a local path", hint="export to a folder, then copy it there")
    out = Path(out).absolute()
    _free(out)
    chosen = FORMATS[format]
    selection = Selection(scan, chosen.holds, options, report)
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep_aside(out)
    with workplace(out) as aside:
        aside.mkdir()
        chosen.write(selection, aside / out.name)
        written = [path for path in aside.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in written)
        beside = [path for path in aside.iterdir() if path.name != out.name]
        for made in [*beside, aside / out.name]:  # what lies beside it is there before it
            _free(out.parent / made.name)
            settle(made, out.parent / made.name)
    return Exported(out, selection.rows, len(written), size, selection.left_behind, selection.dropped)


def _free(path: Path) -> None:
    if os.path.lexists(path):
        raise StoreExistsError(f"{path} exists", hint="choose another path: an export replaces nothing")
