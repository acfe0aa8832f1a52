"""Owns what importers share: from the values of some framework's record to the fields of a Trajectory.

Left-padded prompts, right-padded responses and one block all come down to `prompt`, `response` and lists that
are as long as the response; codec.encode shifts those. Nothing is invented: what is not there stays null,
a reward that is not known is NaN, a version without boundaries is a span.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import ImportFormatError, ValidationError
from trajstore.importers.messages import check_messages, message_text, tokenize
from trajstore.importers.records import Imported, ImportOptions, Record
from trajstore.importers.tokenizer import utf8_safe
from trajstore.trajectory import PolicyVersion, Trajectory, TrajectoryStatus, VersionSegment

Array = NDArray[Any]
Convert = Callable[[Any, int], Iterable[Trajectory]]
"""A record's value and its number in the file → the trajectories in it."""

NOT_KNOWN = math.nan
MAX_ARRAY = 1 << 16
"""Numbers of one array that are kept in metadata; of a larger one (router choices, pixels) its shape is."""

_MAX_VALUES = 1 << 20
_MAX_TEXT = 256 << 20
_LEAVES = frozenset({type(None), bool, str, int, float})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_UNIQUE = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-|[0-9a-fA-F]{32}")
_MISSHAPEN = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)


@dataclass(frozen=True)
class Origin:
    """Where the rows of one file come from.

    Attributes:
        format: name of the format.
        file: name of the file, for `source`.
        namespace: what makes ids of this file differ from those of any other.
    """

    format: str
    file: str
    namespace: str

    @classmethod
    def of(cls, format: str, path: Path, options: ImportOptions) -> Origin:
        """The origin of a file's rows; alone, a file is its own namespace."""
        return cls(format, path.name, options.namespace or path.name)

    @property
    def source(self) -> str:
        """The column `source`."""
        return f"{self.format}:{self.file}"

    def id(self, own: object) -> str:
        """Id of a row that the file calls `own`."""
        return f"{self.format}:{self.namespace}:{own}"

    def group(self, own: object) -> str | None:
        """Id of a group; one that is unique by itself (a UUID) is kept, so that files can share it."""
        if own is None:
            return None
        return own if isinstance(own, str) and _UNIQUE.match(own) else self.id(own)


def convert(
    records: Iterable[Record], origin: Origin, options: ImportOptions, build: Convert
) -> Iterator[Imported]:
    """The trajectories of every record; one that `build` cannot read is a fault that names it."""
    for number, record in enumerate(records):
        try:
            made = list(build(record.data, number))
            for trajectory in made:
                if options.tokenizer is not None:
                    tokenize(trajectory, options.tokenizer, record.where)
        except ImportFormatError as error:
            placed = error if record.where in error.message else _placed(record, error.message, error.hint)
            options.fault(record.where, placed, record.data)
            continue
        except ValidationError as error:
            options.fault(record.where, _placed(record, error.message, error.hint), record.data)
            continue
        except _MISSHAPEN as error:
            reason = f"not a record of {origin.format}: {_described(error)}"
            options.fault(record.where, _placed(record, reason, "name the right --format"), record.data)
            continue
        for trajectory in made:
            pack(trajectory)
            yield Imported(trajectory, record.where, record.bytes_read)


def elements(path: Path, values: Sequence[Any], size: int, part: str = "") -> Iterator[Record]:
    """A file's list of values as records `path[i]`, or `path.part[i]`."""
    name = f"{path}.{part}" if part else str(path)
    for index, value in enumerate(values):
        yield Record(value, f"{name}[{index}]", size * (index + 1) // max(len(values), 1))


def _placed(record: Record, reason: str, hint: str | None) -> ImportFormatError:
    return ImportFormatError(f"{record.where}: {reason}", hint=hint)


def _described(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}" if error.args else "a key is missing"
    return str(error) or type(error).__name__


def pack(row: Trajectory) -> None:
    """Makes arrays of a row's long lists: a fifth of the memory, nothing for the garbage collector to walk.

    A list that holds anything but numbers that fit stays as it is, for the codec to name what is wrong.
    """
    for name, kind in _PACKED.items():
        values = getattr(row, name)
        if type(values) is not list or len(values) < _LONG:
            continue
        try:
            if kind == "B":
                setattr(row, name, np.frombuffer(bytes(values), np.uint8))
            else:
                numbers = np.frombuffer(struct.pack(f"{len(values)}{kind}", *values), np.dtype(kind))
                if kind == "i" or not np.isinf(numbers).any():  # given so, or a double that does not fit
                    setattr(row, name, numbers)
        except (TypeError, ValueError, OverflowError, struct.error):
            continue


_LONG = 256
_PACKED = {
    "tokens": "i", "prompt_tokens": "i", "response_tokens": "i", "attention_mask": "B", "loss_mask": "B",
    "action_mask": "B", "log_probs": "f", "behavior_log_probs": "f", "token_rewards": "f", "values": "f",
    "advantages": "f", "returns": "f",
}  # fmt: skip


def reward_fields(value: Any) -> dict[str, Any]:
    """`reward`, and where there is more than a number: `token_rewards`, or the named ones as `named`.

    A list is per token and its sum the reward. Of several named rewards the one called score or reward is it;
    else, if there is only one number, that; else it is not known.
    """
    if value is None:
        return {"reward": NOT_KNOWN}
    if isinstance(value, Mapping):
        named = {key: one for key, one in value.items() if _is_number(one)}
        picked = [named[key] for key in ("score", "reward") if key in named] or list(named.values())
        known = len(named) == 1 or "score" in named or "reward" in named
        return {"reward": float(picked[0]) if known else NOT_KNOWN, "named": dict(value)}
    if isinstance(value, list | tuple | np.ndarray) and np.ndim(value):
        tokens = np.asarray(value, np.float32)
        return {"reward": float(tokens.sum(dtype=np.float64)), "token_rewards": tokens}
    if not _is_number(value):
        raise ValueError(f"the reward is {value!r}, expected a number")
    return {"reward": float(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.bool_) or (
        isinstance(value, np.ndarray) and value.ndim == 0
    )


def version_fields(oldest: Any, newest: Any = None, *, known: str = "span") -> dict[str, Any]:
    """One version when both ends are the same, else the span; nothing when they are not known (None, < 0)."""
    low = _version(oldest)
    high = low if newest is None else _version(newest)
    if low is None or high is None:
        return {}
    if low == high:
        return {"version": PolicyVersion(low)}
    return {"version_span": (min(low, high), max(low, high)), "version_known": known}


def listed_versions(versions: Any) -> dict[str, Any]:
    """Versions of an engine's calls without their boundaries: exact only when all are the same."""
    numbers = [_version(version) for version in versions or ()]
    if not numbers or None in numbers:
        return {}
    return version_fields(min(numbers), max(numbers), known="list")  # type: ignore[type-var]  # no None left


def _version(value: Any) -> int | None:
    """A counter, also as text ("7", "step_7"); None when it holds no one number."""
    if isinstance(value, str):
        found = re.findall(r"\d+", value)
        return int(found[0]) if len(found) == 1 else None
    if value is None or value != value or int(value) < 0:
        return None
    return int(value)


def segments(versions: Array, start: int = 0) -> list[VersionSegment]:
    """Runs of equal versions, [T] with -1 where none; positions begin at `start`."""
    values = np.asarray(versions)
    edges = np.flatnonzero(np.diff(values)) + 1
    bounds = [0, *edges.tolist(), len(values)] if len(values) else [0]
    return [
        VersionSegment(start + a, start + b, PolicyVersion(int(values[a])))
        for a, b in pairwise(bounds)
        if values[a] >= 0
    ]


_STATUS = {
    "completed": (TrajectoryStatus.COMPLETED, "stop", True),
    "truncated": (TrajectoryStatus.COMPLETED, "length", False),
    "aborted": (TrajectoryStatus.ABORTED, "abort", False),
    "failed": (TrajectoryStatus.FAILED, "error", None),
    "pending": (TrajectoryStatus.PENDING, None, None),
    "generating": (TrajectoryStatus.GENERATING, None, None),
}


def status_fields(status: Any) -> dict[str, Any]:
    """status, finish_reason and terminated of a framework's word for them; cut off is not terminated."""
    word = str(status).lower()
    if word not in _STATUS:
        raise ValueError(f"status {status!r} is none of {', '.join(_STATUS)}")
    state, reason, terminated = _STATUS[word]
    return {"status": state, "finish_reason": reason, "terminated": terminated}


def finish_fields(reason: Any) -> dict[str, Any]:
    """The same from an engine's finish reason; an unknown one is kept and says nothing of termination."""
    if reason is None:
        return {"status": TrajectoryStatus.COMPLETED}
    word = str(reason).lower()
    aborted = word in ("abort", "aborted", "cancelled", "canceled")
    terminated = {"stop": True, "eos": True, "length": False, "max_tokens": False}.get(word)
    return {
        "status": TrajectoryStatus.ABORTED if aborted else TrajectoryStatus.COMPLETED,
        "finish_reason": str(reason),
        "terminated": False if aborted else terminated,
    }


def spread(value: Any, length: int) -> Any:
    """A scalar advantage as one value a token of the response; a list as it is."""
    return np.full(length, value, np.float32) if value is not None and np.ndim(value) == 0 else value


def text(value: Any) -> str:
    """Text that UTF-8 can hold; of chat messages, their contents line by line; "" for None."""
    if value is None:
        return ""
    if isinstance(value, list):
        parts = [m.get("content") if isinstance(m, Mapping) else m for m in value]
        return "\n".join(text(part) for part in parts if part)
    return utf8_safe(value if isinstance(value, str) else str(value))


def chat(*parts: Any) -> list[Any] | None:
    """Chat messages out of parts that are lists of messages or text of a user and an assistant, if any is."""
    if not any(isinstance(part, list) for part in parts):
        return None
    roles = ("user", "assistant")
    made: list[Any] = []
    for role, part in zip(roles, parts, strict=False):
        made += part if isinstance(part, list) else [{"role": role, "content": part}] if part else []
    return made


def conversation(messages: Any) -> dict[str, Any]:
    """prompt, response and messages of a checked chat: text before, and the last text of, the assistant."""
    said = check_messages(messages, "the messages")
    first = next((i for i, m in enumerate(said) if m["role"] == "assistant"), len(said))
    texts = [utf8_safe(message_text(message)) for message in said]
    answers = [t for t, m in zip(texts, said, strict=True) if m["role"] == "assistant" and t]
    return {
        "prompt": "\n".join(filter(None, texts[:first])),
        "response": answers[-1] if answers else "",
        "messages": said,
    }


def rest(data: Mapping[str, Any], *taken: str, **more: Any) -> dict[str, Any]:
    """Metadata: what a record holds besides the keys taken, and `more`; None is left out."""
    kept = {str(k): v for k, v in data.items() if k not in taken and v is not None}
    kept |= {k: v for k, v in more.items() if v is not None}
    return plain(kept) if kept else {}


def plain(value: Any) -> Any:
    """A value of a dump as JSON can hold it: arrays become lists, bytes base64.

    Raises:
        ValueError: it unfolds to more than a million values, or to a text of more than 256 MiB: it repeats or
            holds itself.
    """
    left, room = [_MAX_VALUES], [_MAX_TEXT]

    def take(budget: list[int], count: int, what: str) -> None:
        budget[0] -= count
        if budget[0] < 0:
            most = _MAX_TEXT if budget is room else _MAX_VALUES
            raise ValueError(f"its metadata unfolds to more than {most:,} {what}")

    def walk(value: Any) -> Any:
        kind = type(value)
        if kind is str or kind is bytes:
            take(room, len(value), "characters of text")
        if kind in _LEAVES:
            return value
        if kind in _CONTAINERS:
            take(left, len(value), "values")
            if kind is dict:
                return {str(key): walk(one) for key, one in value.items()}
            return [walk(one) for one in value]
        if isinstance(value, np.ndarray):
            if value.dtype == object:
                return walk(value.tolist())
            if value.size > MAX_ARRAY:
                return {"left_out": {"dtype": str(value.dtype), "shape": list(value.shape)}}
            take(left, value.size, "values")
            return value.tolist()
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, list):  # rows of a jagged tensor
            return walk(list(value))
        if isinstance(value, bytes):
            return {"base64": base64.b64encode(value).decode()}
        return {"left_out": kind.__name__}

    try:
        return walk(value)
    except RecursionError:
        raise ValueError("its metadata is nested too deeply") from None


def grouped(origin: Origin, prompt: Any, options: ImportOptions) -> tuple[str | None, str | None]:
    """Group of rows of one file that have the same prompt, and how it was found, for metadata.

    None and None when the options say that only groups which a file names count.
    """
    if not options.derive_groups or not len(prompt):
        return None, None
    raw = prompt.encode() if isinstance(prompt, str) else np.ascontiguousarray(prompt, np.int64).tobytes()
    return origin.id(f"prompt-{hashlib.blake2b(raw, digest_size=8).hexdigest()}"), "equal prompt"
