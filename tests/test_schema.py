"""The row's columns: their promises to readers, users' own columns, and the format's version."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from trajstore import schema
from trajstore.errors import FormatVersionError, SchemaError
from trajstore.schema import BY_NAME, COLUMNS, ROW_SCHEMA, SCHEMA, Column, list_of


def test_elements_of_lists_are_never_null() -> None:
    lists = [field.type for field in SCHEMA if pa.types.is_list(field.type)]
    assert len(lists) == 13
    assert not any(kind.value_field.nullable for kind in lists)
    assert {kind.value_field.name for kind in lists} == {"element"}


def test_masks_are_int8_and_floats_float32() -> None:
    assert {BY_NAME[name].type.value_type for name in schema.TOKEN_MASKS} == {pa.int8()}
    assert {BY_NAME[name].type.value_type for name in schema.TOKEN_FLOATS} == {pa.float32()}
    token = {column.name for column in COLUMNS if column.role == "token"}
    assert token == {"tokens", *schema.TOKEN_MASKS, *schema.TOKEN_FLOATS}


def test_a_row_is_a_stored_row_without_its_stamps() -> None:
    stamps = [name for name in SCHEMA.names if name not in ROW_SCHEMA.names]
    assert stamps == ["ingested_at", "writer_id", "writer_seq", "ingest_snapshot"]
    assert [name for name in SCHEMA.names if name not in stamps] == ROW_SCHEMA.names


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: c.name)
def test_roles_and_units_travel_with_the_field(column: Column) -> None:
    metadata = {k.decode(): v.decode() for k, v in column.field.metadata.items()}
    assert metadata["trajstore.role"] == column.role
    assert metadata.get("trajstore.unit", "") == column.unit
    assert column.doc


EXTRA = [
    Column("entropy", list_of(pa.float32()), "token", unit="nat", pad=-1.5),
    Column("top_ids", list_of(pa.int32()), "list"),
    Column("difficulty", pa.float64()),
]


def test_a_users_columns_come_back_from_the_schema() -> None:
    stored = schema.with_extra(EXTRA)
    assert stored.names[: len(SCHEMA.names)] == SCHEMA.names
    assert schema.extra_columns(stored) == tuple(EXTRA)
    assert schema.extra_columns(pa.ipc.read_schema(stored.serialize())) == tuple(EXTRA)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ([Column("reward", pa.float64())], "'reward' is already there"),
        ([EXTRA[0], EXTRA[0]], "'entropy' is already there"),
        ([Column("x", pa.int32(), nullable=False)], "'x' must be nullable"),
    ],
)
def test_extra_columns_that_cannot_be(extra: list[Column], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        schema.with_extra(extra)


@pytest.mark.parametrize(
    ("type", "role", "says"),
    [
        (pa.float32(), "token", "role 'token' does not go with type float"),
        (list_of(pa.float32()), "scalar", "role 'scalar' does not go with"),
        (pa.list_(pa.float32()), "token", "may be null"),
        (pa.list_(pa.float32()), "list", "may be null"),
        (pa.float32(), "list", "role 'list' does not go with type float"),
    ],
)
def test_a_role_goes_with_its_type(type: pa.DataType, role: schema.Role, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        Column("x", type, role)


@pytest.mark.parametrize("metadata", [None, {"trajstore.role": "tokens"}])
def test_a_field_that_does_not_say_its_role(metadata: dict[str, str] | None) -> None:
    with pytest.raises(SchemaError, match="column 'x'"):
        Column.from_field(pa.field("x", pa.int32(), metadata=metadata))


def test_stores_of_newer_programs_are_refused() -> None:
    schema.check_format(schema.FORMAT_VERSION, "here")
    with pytest.raises(FormatVersionError, match=f"here has format version {schema.FORMAT_VERSION + 1}"):
        schema.check_format(schema.FORMAT_VERSION + 1, "here")


def test_the_page_lists_every_column() -> None:
    page = json.loads(schema.to_json())
    assert page["format_version"] == schema.FORMAT_VERSION
    assert [column["name"] for column in page["columns"]] == SCHEMA.names
    tokens = next(column for column in page["columns"] if column["name"] == "tokens")
    assert tokens["type"] == "list<int32 not null>"
    assert [c["name"] for c in page["columns"] if c["pad"] is not None] == [
        c.name for c in COLUMNS if c.role == "token"
    ]
    assert schema.to_markdown().count("\n") == len(COLUMNS) + 2


def test_the_generated_files_are_written_between_the_marks(tmp_path: Path) -> None:
    start, end = schema.TABLE_MARKS
    (tmp_path / "README.md").write_text(f"before\n{start}old\n{end}after\n")
    schema.write(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text == f"before\n{start}{schema.to_markdown()}{end}after\n"
    assert (tmp_path / f"trajectory.v{schema.FORMAT_VERSION}.json").read_text() == schema.to_json()
