"""Owns the table of file formats and how one is told from another; importers know no Arrow and no store.

To add one: a file beside this one with its FORMATS, its name in the table, a test with a small dump.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trajstore.errors import ImportFormatError
from trajstore.importers import (
    areal,
    atif,
    hf,
    later,
    messages,
    nemo_rl,
    open_instruct,
    openrlhf,
    prime_rl,
    rllm,
    skyrl,
    slime,
    trajstore_jsonl,
    trajstore_parquet,
    trl,
    trlx,
    turns,
    verl,
)  # fmt: skip
from trajstore.importers.files import SourceFile, digest, sources
from trajstore.importers.head import Format, Head, NotRecognisedError, look
from trajstore.importers.records import Fault, Imported, Importer, ImportOptions, kind_of
from trajstore.importers.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "FORMATS",
    "Detected",
    "Fault",
    "ImportOptions",
    "Imported",
    "Importer",
    "NotRecognisedError",
    "SourceFile",
    "Tokenizer",
    "beside",
    "described",
    "detect",
    "digest",
    "joined",
    "load_tokenizer",
    "open_importer",
    "sources",
]


def _is_messages(head: Head) -> str | None:
    listed = [key for key in messages.MESSAGE_KEYS if head.lists(key)]
    own = any(head.lists(key) for key in ("tokens", "version_segments"))
    return f"has a list of messages under {listed[0]!r} and no tokens" if listed and not own else None


def _is_own(head: Head) -> str | None:
    if head.container == "json" and head.names and head.names <= trajstore_jsonl.FIELDS:
        return "has only fields of Trajectory"
    return None


_MODULES = (
    trajstore_parquet, verl, slime, areal, prime_rl, nemo_rl, skyrl, open_instruct, rllm, atif, trlx, turns,
    trl, later,
)  # fmt: skip
_TABLE: tuple[Format, ...] = (  # the first that fits is it: the more particular ones come first
    *(format for module in _MODULES for format in module.FORMATS),
    Format("messages", _is_messages, messages.read),
    Format("trajstore-jsonl", _is_own, trajstore_jsonl.read),
    *openrlhf.FORMATS,
    *hf.FORMATS,
)

FORMATS: dict[str, Importer] = {f.name: f.read for f in _TABLE if f.read is not None}


class Detected(NamedTuple):
    """What a file is.

    Attributes:
        format: a name of FORMATS.
        why: what of the file shows it.
    """

    format: str
    why: str


def open_importer(format: str) -> Importer:
    """The importer of a format; "auto" looks at each file's beginning.

    Raises:
        ImportFormatError: there is no such format, or it is not imported yet.
    """
    if format == "auto":
        return _read_detected
    if format not in FORMATS:
        if any(f.name == format for f in later.FORMATS):
            raise _not_yet(format, f"format {format!r}")
        raise ImportFormatError(
            f"unknown format {format!r}; known: {', '.join(['auto', *sorted(FORMATS)])}",
            hint="leave the format out to have it detected",
        )
    return FORMATS[format]


def described() -> list[tuple[str, str]]:
    """Name and one line of every format that is imported, by name."""
    return [(name, (read.__doc__ or "").partition("\n")[0]) for name, read in sorted(FORMATS.items())]


def detect(path: Path) -> Detected:
    """The format of a file and the reason for it, from its beginning; nothing in it is carried out.

    Raises:
        NotRecognisedError: no format fits, or the format is known and not imported.
        ImportFormatError: the file is damaged or cannot be read.
    """
    head = look(path)
    for format in _TABLE:
        why = format.fits(head)
        if why is None:
            continue
        if format.read is None:
            raise _not_yet(format.name, f"{head.where}: {why}")
        return Detected(format.name, f"{head.where} {why}")
    raise _unrecognised(head)


def beside(files: list[SourceFile]) -> dict[Path, str]:
    """Files of a folder that are no dumps of their own, with the reason: they are left out of its import.

    Empty ones are markers, or of a writer that was stopped. Train dumps are joined into the rollouts they
    belong to; miles' side files and prime-rl's `effective` repeat rows of a file that is there; the others
    describe a run.
    """
    there = {file.path for file in files}
    joined = {train for path in there for train in slime.train_files(path)}
    reasons: dict[Path, str] = {}
    for path in sorted(there):
        if not path.stat().st_size:
            reasons[path] = "is empty"
        elif path.name.endswith(".tmp"):
            reasons[path] = "its writer has not finished it"
        elif path in joined:
            reasons[path] = "joined into the rollouts it belongs to"
        elif path.name in _DESCRIPTIONS or path.name.endswith("_metadata.jsonl"):
            reasons[path] = "describes a run"
        elif path.parent.name == "effective" and path.parent.parent / "all" / path.name in there:
            reasons[path] = "its episodes are in all/"
        elif path.parent.name in ("dashboard_columns", "trajectory"):
            number = path.stem.removeprefix("rollout_")
            if path.parent.parent / "rollout_data" / f"{number}.pt" in there:
                reasons[path] = "its samples are in rollout_data/"
    return reasons


def joined(path: Path) -> list[Path]:
    """Other files that the rows of a file are read from too."""
    result = path.parent.parent / "result.json"
    verdict = [result] if path.parent.name == "agent" and result.is_file() else []
    return [*slime.train_files(path), *verdict]


_DESCRIPTIONS = {
    "meta.json", "config.json", "result.json", "results.json", "batch_summary.json", "metadata.json",
    "aggregated_results.jsonl", "trajectory_index.json", "dataset_info.json",
}  # fmt: skip


def _read_detected(path: Path, options: ImportOptions) -> Iterator[Imported]:
    yield from FORMATS[detect(path).format](path, options)


def _not_yet(name: str, what: str) -> NotRecognisedError:
    why = later.WHY.get(name, "there is no importer for it yet")
    return NotRecognisedError(
        f"{what}: that is {name}, which is not imported: {why}",
        hint="convert it to trajstore-jsonl (Trajectory.to_dict, one a line)",
    )


def _unrecognised(head: Head) -> ImportFormatError:
    if isinstance(head.record, dict) or head.container == "parquet":
        keys = list(head.record) if isinstance(head.record, dict) else sorted(head.names)
        more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
        found = f"keys {', '.join(map(repr, keys[:8]))}{more}" if keys else "an object without keys"
        strange = sorted(set(keys) - trajstore_jsonl.FIELDS)
        if strange and len(strange) < len(keys):
            found += f" (of which {strange[0]!r} is no field of Trajectory)"
    elif head.container == "json":
        found = kind_of(head.record)
    else:
        found = f"a file of kind {head.container} that no known framework writes"
    return NotRecognisedError(
        f"{head.where}: format not recognised: found {found}",
        hint="`trajstore formats` lists what is known: name the format, or convert the file to one of them",
    )
