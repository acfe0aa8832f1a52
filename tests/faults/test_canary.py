"""What we rely on in deltalake and nothing documents: a new release that changes it fails here first."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

SCHEMA = pa.schema([("x", pa.int64())])
DISK = pytest.mark.parametrize("new", ["disk"], indirect=True)


@pytest.fixture(params=["disk", "s3"])
def new(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str] | None]:
    uri, options = (tmp_path / "table").as_uri(), None
    if request.param == "s3":
        uri = f"s3://bucket/{tmp_path.name}"
        options = request.getfixturevalue("s3_options") | {"AWS_ALLOW_HTTP": "true"}
    configuration = {"delta.checkpointInterval": "5"}
    DeltaTable.create(uri, SCHEMA, mode="error", configuration=configuration, storage_options=options)
    return uri, options


def _open(new: tuple[str, dict[str, str] | None]) -> DeltaTable:
    return DeltaTable(new[0], storage_options=new[1])


def _add(name: str, rows: int = 1) -> AddAction:
    return AddAction(name, 10, {}, 0, True, json.dumps({"numRecords": rows}))


def _remove(name: str) -> RemoveAction:
    return RemoveAction(name, True, 0, 10, {})


def _commit(table: DeltaTable, *actions: Any, note: str = "", **versions: int) -> None:
    properties = CommitProperties(
        custom_metadata={"trajstore": note},
        app_transactions=[Transaction(name, number, 0) for name, number in versions.items()],
        max_commit_retries=0,
    )
    table.create_write_transaction(list(actions), "append", table.schema(), commit_properties=properties)


def _names(table: DeltaTable) -> list[str]:
    return sorted(pa.table(table.get_add_actions(flatten=True))["path"].to_pylist())


def test_a_stale_append_is_refused(new: tuple[str, dict[str, str] | None]) -> None:
    first, second = _open(new), _open(new)
    _commit(first, _add("a"), a=0)
    with pytest.raises(CommitFailedError):
        _commit(second, _add("b"), b=0)
    assert _names(_open(new)) == ["a"]
    second.update_incremental()
    _commit(second, _add("b"), b=0)
    assert _names(_open(new)) == ["a", "b"]
    assert _open(new).version() == 2


def test_a_stale_rewrite_is_refused(new: tuple[str, dict[str, str] | None]) -> None:
    _commit(_open(new), _add("a"), _add("b"))
    first, second = _open(new), _open(new)
    _commit(first, _remove("a"), _remove("b"), _add("ab"), maintenance=1)
    with pytest.raises(CommitFailedError):
        _commit(second, _remove("a"), _remove("b"), _add("ba"), maintenance=1)
    assert _names(_open(new)) == ["ab"]


@DISK
def test_an_append_behind_a_rewrite_is_refused(new: tuple[str, dict[str, str] | None]) -> None:
    _commit(_open(new), _add("a"))
    first, second = _open(new), _open(new)
    _commit(first, _remove("a"), _add("aa"), maintenance=1)
    with pytest.raises(CommitFailedError):
        _commit(second, _add("b"), b=0)
    assert _names(_open(new)) == ["aa"]


@DISK
def test_transaction_versions_outlive_reopening_and_checkpoints(
    new: tuple[str, dict[str, str] | None],
) -> None:
    table = _open(new)
    for number in range(12):
        _commit(table, _add(f"a{number}"), **{"w": number} if number < 3 else {"v": number})
        table.update_incremental()
        assert table.transaction_version("w") == min(number, 2)
    again = _open(new)
    assert (again.transaction_version("w"), again.transaction_version("v")) == (2, 11)
    assert again.transaction_version("nobody") is None
    again.create_checkpoint()
    again = _open(new)
    assert (again.transaction_version("w"), again.transaction_version("v")) == (2, 11)
    # Versions are not enforced: that is our own check to make.
    _commit(again, _add("twice"), w=1)
    assert "twice" in _names(_open(new))


@DISK
def test_notes_come_back_in_the_history(new: tuple[str, dict[str, str] | None]) -> None:
    table = _open(new)
    for number in range(7):
        _commit(table, _add(f"a{number}"), note=json.dumps({"n": number}))
        table.update_incremental()
    history = list(reversed(_open(new).history()))
    assert [entry["version"] for entry in history] == list(range(8))
    assert [json.loads(entry["trajstore"])["n"] for entry in history[1:]] == list(range(7))
    assert all(isinstance(entry["timestamp"], int) for entry in history)


def test_the_log_is_one_json_line_an_action(tmp_path: Path) -> None:
    uri = tmp_path / "table"
    DeltaTable.create(uri.as_uri(), SCHEMA)
    _commit(DeltaTable(uri), _add("a b"))
    _commit(DeltaTable(uri), _remove("a b"), _add("c"))
    lines = (uri / "_delta_log" / f"{2:020d}.json").read_bytes().splitlines()
    assert any(line.startswith(b'{"add"') and json.loads(line)["add"]["path"] == "c" for line in lines)
    assert any(line.startswith(b'{"remove"') for line in lines)


def test_statistics_come_back_flat_and_an_older_version_opens(tmp_path: Path) -> None:
    uri = tmp_path / "table"
    DeltaTable.create(uri.as_uri(), SCHEMA)
    pq.write_table(pa.table({"x": [1, 2, 3]}), uri / "a.parquet")
    said = {"numRecords": 3, "minValues": {"x": 1}, "maxValues": {"x": 3}, "nullCount": {"x": 0}}
    table = DeltaTable(uri)
    _commit(table, AddAction("a.parquet", 9, {}, 0, True, json.dumps(said)))
    (row,) = pa.table(DeltaTable(uri).get_add_actions(flatten=True)).to_pylist()
    assert (row["num_records"], row["size_bytes"]) == (3, 9)
    assert (row["min.x"], row["max.x"], row["null_count.x"]) == (1, 3, 0)
    table = DeltaTable(uri)
    table.load_as_version(0)
    assert (table.version(), _names(table)) == (0, [])
