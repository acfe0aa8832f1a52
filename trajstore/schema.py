"""Owns the row: every column's name, type, nullability, role, unit and meaning; must not know the objects.

The pyarrow schema, `schemas/trajectory.v1.json` and the table in `schemas/README.md` are generated from
`COLUMNS`: run `make schemas` after a change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa

from trajstore.errors import FormatVersionError, SchemaError

FORMAT_VERSION = 1

Role = Literal["scalar", "token", "list"]


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        name: column name.
        type: Arrow type; elements of lists are never null.
        role: `scalar`; `token` (null, or exactly as long as `tokens`); `list` (ragged, not aligned).
        doc: one line of meaning.
        nullable: whether a row may have no value.
        unit: unit of the values, "" when they have none.
        pad: value on padding positions; 0 unless given. Only for `token` columns.
        stamp: set by the store when a row is appended, never by the caller.
    """

    name: str
    type: pa.DataType
    role: Role = "scalar"
    doc: str = ""
    nullable: bool = True
    unit: str = ""
    pad: float = 0
    stamp: bool = False

    def __post_init__(self) -> None:
        listed = pa.types.is_list(self.type)
        if listed == (self.role == "scalar"):
            raise SchemaError(
                f"column {self.name!r}: role {self.role!r} does not go with type {self.type}",
                hint="token and list columns are lists (trajstore.schema.list_of), scalars are not",
            )
        if listed and self.type.value_field.nullable:
            raise SchemaError(
                f"column {self.name!r}: elements of {self.type} may be null",
                hint="build the type with trajstore.schema.list_of(...), whose elements are not null",
            )

    @property
    def field(self) -> pa.Field:
        """The Arrow field; role, unit and pad travel in its metadata."""
        metadata: dict[str, str] = {"trajstore.role": self.role}
        if self.unit:
            metadata["trajstore.unit"] = self.unit
        if self.role == "token":
            metadata["trajstore.pad"] = json.dumps(self.pad)
        return pa.field(self.name, self.type, self.nullable, metadata)

    @staticmethod
    def from_field(field: pa.Field) -> Column:
        """The column an Arrow field describes; one of ours keeps its own meaning.

        Raises:
            SchemaError: the field does not say its role and is not a column of the row.
        """
        if field.name in BY_NAME:
            return BY_NAME[field.name]
        metadata = {k.decode(): v.decode() for k, v in (field.metadata or {}).items()}
        if "trajstore.role" not in metadata:
            raise SchemaError(
                f"column {field.name!r} is not part of the row and does not say its role",
                hint="describe it with trajstore.schema.Column(name, type, role=...)",
            )
        return Column(
            field.name,
            field.type,
            _role(field.name, metadata["trajstore.role"]),
            nullable=field.nullable,
            unit=metadata.get("trajstore.unit", ""),
            pad=json.loads(metadata.get("trajstore.pad", "0")),
        )


def _role(name: str, text: str) -> Role:
    for role in get_args(Role):
        if role == text:
            return role  # type: ignore[no-any-return]  # get_args is untyped
    raise SchemaError(f"column {name!r} has role {text!r}", hint=f"roles: {', '.join(get_args(Role))}")


def list_of(element: pa.DataType) -> pa.DataType:
    """A list type whose elements are not null (23 to 30 % cheaper to decode)."""
    return pa.list_(pa.field("element", element, nullable=False))


_STRING, _I32, _I64, _F64, _BOOL = pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.bool_()
_TOKENS, _MASK, _FLOATS = list_of(pa.int32()), list_of(pa.int8()), list_of(pa.float32())
_TIME = pa.timestamp("us", "UTC")

SEGMENT = pa.struct(
    [
        pa.field("start", pa.int32(), False),
        pa.field("end", pa.int32(), False),
        pa.field("version_id", pa.int64(), False),
        pa.field("timestamp", pa.float64(), False),
        pa.field("step", pa.int64(), False),
    ]
)


def _key(name: str, type: pa.DataType, doc: str, unit: str = "", *, stamp: bool = False) -> Column:
    return Column(name, type, doc=doc, nullable=False, unit=unit, stamp=stamp)


def _scalar(name: str, type: pa.DataType, doc: str, unit: str = "", *, stamp: bool = False) -> Column:
    return Column(name, type, doc=doc, unit=unit, stamp=stamp)


def _token(name: str, type: pa.DataType, doc: str, unit: str = "", *, nullable: bool = True) -> Column:
    return Column(name, type, "token", doc, nullable, unit)


COLUMNS: tuple[Column, ...] = (
    _key("id", _STRING, "name of the row; an empty one is filled at append"),
    _scalar("group_id", _STRING, "siblings of one prompt (GRPO group)"),
    _scalar("group_size", _I32, "how many the group was meant to have, when known", "trajectories"),
    _key("prompt", _STRING, "prompt text, empty when only tokens are known"),
    _key("response", _STRING, "response text, empty when only tokens are known"),
    _scalar("messages", _STRING, "JSON list of chat messages (roles, tool calls), verbatim"),
    _token("tokens", _TOKENS, "prompt and response ids, unpadded", "token id", nullable=False),
    _scalar("prompt_length", _I32, "null, with response_length, when the split is not known", "tokens"),
    _scalar("response_length", _I32, "null, with prompt_length, when the split is not known", "tokens"),
    _key("length", _I32, "number of tokens; planning never touches a list column", "tokens"),
    _key("id_hash", _I64, "first 8 bytes of blake2b(id), little endian; seeded draws use it"),
    Column("prompt_tokens", _TOKENS, "list", "null = the first prompt_length tokens", unit="token id"),
    Column("response_tokens", _TOKENS, "list", "null = the tokens after the prompt", unit="token id"),
    _token("attention_mask", _MASK, "null = not given, loads as ones", "0 or 1"),
    _token("loss_mask", _MASK, "train on this token; null loads as 0 on the prompt, 1 after it", "0 or 1"),
    _token("action_mask", _MASK, "sampled by the policy; null loads as loss_mask", "0 or 1"),
    _token("log_probs", _FLOATS, "recomputed by the trainer under log_probs_version", "nat"),
    _scalar("log_probs_version", _I64, "policy version under which log_probs were recomputed"),
    _token("behavior_log_probs", _FLOATS, "given by the engine when the token was sampled", "nat"),
    _token("token_rewards", _FLOATS, "replace reward, are never added to it"),
    _token("values", _FLOATS, "V of the state before token t"),
    _token("advantages", _FLOATS, "advantage of token t"),
    _token("returns", _FLOATS, "return from token t"),
    _scalar("bootstrap_value", _F64, "V after the last token of a truncated episode"),
    _key("reward", _F64, "NaN is allowed and reported, never averaged silently"),
    _scalar("version_id", _I64, "policy version of the trajectory, null when not known"),
    _scalar("version_step", _I64, "optimizer step at that version's publication"),
    _scalar("version_timestamp", _F64, "when that version was published", "s since the epoch"),
    Column("version_segments", list_of(SEGMENT), "list", "half-open ranges of tokens by policy version"),
    _scalar("oldest_version_id", _I64, "from the segments, else version_id, else the source's span"),
    _scalar("newest_version_id", _I64, "from the segments, else version_id, else the source's span"),
    _key("version_known", _STRING, "exact, span (only oldest and newest), list (no boundaries), absent"),
    _key("status", _STRING, "pending, generating, completed, aborted or failed"),
    _scalar("finish_reason", _STRING, "stop, length, abort, error, ... as the engine said"),
    _scalar("terminated", _BOOL, "the episode truly ended; false = cut off; null = not known"),
    _scalar("metadata", _STRING, "JSON object"),
    _key("generation_time_ms", _F64, "time the engine took", "ms"),
    _scalar("continuation_prompt", _STRING, "text to continue from"),
    _scalar("start_rollout_id", _STRING, "id of the first attempt"),
    _scalar("parent_id", _STRING, "id of the row this one continues"),
    _scalar("kv_cache_ref", _STRING, "reference into the engine's cache, kept when it is a string"),
    _scalar("continuation_count", _I32, "not null if and only if the row is a PartialTrajectory"),
    _scalar("source", _STRING, "importer or run that brought the row"),
    _key("tokens_retokenized", _BOOL, "ids come from re-tokenising text; log-probs are then null"),
    _key("ingested_at", _TIME, "when the row was appended; never used for order", stamp=True),
    _key("writer_id", _STRING, "who wrote the row; with writer_seq the row's key", stamp=True),
    _key("writer_seq", _I64, "order in the writer's stream: batch_no * 2^32 + position", stamp=True),
    _scalar("ingest_snapshot", _I64, "null in a fresh file, stamped at compaction", stamp=True),
)

BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}

SCHEMA: pa.Schema = pa.schema([column.field for column in COLUMNS])
"""A stored row."""

ROW_SCHEMA: pa.Schema = pa.schema([column.field for column in COLUMNS if not column.stamp])
"""A row before the store has stamped it: what `codec.encode` gives."""

TOKEN_FLOATS: tuple[str, ...] = tuple(c.name for c in COLUMNS if c.role == "token" and c.type == _FLOATS)
"""Per-token float columns, in schema order."""

TOKEN_MASKS: tuple[str, ...] = tuple(c.name for c in COLUMNS if c.role == "token" and c.type == _MASK)
"""Per-token mask columns, in schema order."""


def with_extra(extra: Sequence[Column]) -> pa.Schema:
    """The stored schema with a user's own columns behind ours.

    Raises:
        SchemaError: a name is taken, or an extra column is not nullable (old rows could not be read).
    """
    taken = set(BY_NAME)
    for column in extra:
        if column.name in taken:
            raise SchemaError(f"column {column.name!r} is already there", hint="choose another name")
        if not column.nullable:
            raise SchemaError(f"extra column {column.name!r} must be nullable", hint="drop nullable=False")
        taken.add(column.name)
    return pa.schema([*SCHEMA, *(column.field for column in extra)])


def extra_columns(schema: pa.Schema) -> tuple[Column, ...]:
    """The user's own columns of a stored schema, in order."""
    return tuple(Column.from_field(field) for field in schema if field.name not in BY_NAME)


def check_format(found: int, where: str) -> None:
    """Refuses a store that a newer program wrote.

    Raises:
        FormatVersionError: `found` is above FORMAT_VERSION.
    """
    if found > FORMAT_VERSION:
        raise FormatVersionError(
            f"{where} has format version {found}; this trajstore reads up to {FORMAT_VERSION}",
            hint="upgrade trajstore: pip install -U trajstore",
        )


def to_json() -> str:
    """The text of `schemas/trajectory.v1.json`."""
    page = {
        "format_version": FORMAT_VERSION,
        "columns": [
            {
                "name": c.name,
                "type": _type_name(c.type),
                "nullable": c.nullable,
                "role": c.role,
                "unit": c.unit or None,
                "pad": c.pad if c.role == "token" else None,
                "stamped_by_store": c.stamp,
                "doc": c.doc,
            }
            for c in COLUMNS
        ],
    }
    return json.dumps(page, indent=1) + "\n"


def to_markdown() -> str:
    """The table of columns in `schemas/README.md`."""
    lines = ["| column | type | null | role | unit | meaning |", "|---|---|---|---|---|---|"]
    for c in COLUMNS:
        null = "yes" if c.nullable else "no"
        lines.append(f"| `{c.name}` | `{_type_name(c.type)}` | {null} | {c.role} | {c.unit} | {c.doc} |")
    return "\n".join(lines) + "\n"


def _type_name(type: pa.DataType) -> str:
    if pa.types.is_list(type):
        return f"list<{_type_name(type.value_type)} not null>"
    if pa.types.is_struct(type):
        inner: Iterable[Any] = (f"{f.name}: {_type_name(f.type)}" for f in type)
        return f"struct<{', '.join(inner)}>"
    return str(type)


TABLE_MARKS = ("<!-- generated by make schemas -->\n", "<!-- end -->")


def write(folder: Path) -> None:
    """Writes the generated files of `schemas/` into `folder`; README.md must hold the two marks."""
    (folder / f"trajectory.v{FORMAT_VERSION}.json").write_text(to_json())
    readme = folder / "README.md"
    head, rest = readme.read_text().split(TABLE_MARKS[0])
    _, tail = rest.split(TABLE_MARKS[1])
    readme.write_text(head + TABLE_MARKS[0] + to_markdown() + TABLE_MARKS[1] + tail)
