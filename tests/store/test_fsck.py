"""Every kind of damage is found and named; only orphans are removed."""

import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trajstore import CorruptFileError, Trajectory, TrajectoryStore, UncertainCommitError
from trajstore.schema import Column
from trajstore.store.datafile import DataFile
from trajstore.store.files import FileWriter
from trajstore.store.fsck import fsck
from trajstore.store.log import TORN
from trajstore.store.place import Place, entry


def rows(*names: str) -> list[Trajectory]:
    return [Trajectory(id=name, tokens=[1, 2, 3], prompt_length=1, reward=1.0) for name in names]


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    made = TrajectoryStore.create(tmp_path / "store")
    made.append(rows("a", "b"))
    made.append(rows("c"))
    return made


def first(store: TrajectoryStore) -> Path:
    return store.path / store._table.files()[0].name


def test_a_sound_store_has_nothing_to_say(store: TrajectoryStore) -> None:
    store.maintenance.compact()
    store.append([*rows("d"), Trajectory(id="bad", tokens=[-1])], on_error="quarantine")
    store.tag("now")
    store.maintenance.restore(1)
    assert store.maintenance.fsck() == []


def test_a_missing_file(store: TrajectoryStore) -> None:
    first(store).unlink()
    (finding,) = store.maintenance.fsck(repair=True)
    assert (finding.level, finding.what, finding.repaired) == (
        "error",
        "the log has it, the store does not",
        False,
    )


def test_a_flipped_byte(store: TrajectoryStore) -> None:
    data = bytearray(first(store).read_bytes())
    data[len(data) // 3] ^= 1
    first(store).write_bytes(bytes(data))
    (finding,) = store.maintenance.fsck()
    assert finding.where == first(store).name
    assert "digest" in finding.what


def test_a_truncated_file(store: TrajectoryStore) -> None:
    first(store).write_bytes(first(store).read_bytes()[:-10])
    (finding,) = store.maintenance.fsck()
    assert "the log says" in finding.what


def test_a_row_that_breaks_the_contract_and_wrong_statistics(store: TrajectoryStore) -> None:
    table = pq.read_table(first(store))
    at = table.schema.get_field_index("length")
    bad = table.set_column(at, table.schema.field(at), pa.array([3, 9], pa.int32()))
    with FileWriter(store._place, store.schema) as writer:
        writer.write(bad.combine_chunks().to_batches()[0])
        made = writer.close()
    lying = DataFile(made.name, made.rows, made.bytes, made.low | {"length": 5}, made.high, made.nulls)
    store._table.commit([lying], writer_id="someone else", batch_no=0)
    found = store.maintenance.fsck()
    assert any("length goes from 3 to 9, the log says 5 to 9" in f.what for f in found)
    assert any("column 'length'" in f.what and "not the number of tokens" in f.what for f in found)


def test_one_id_twice(store: TrajectoryStore) -> None:
    store.append(rows("a"))
    (finding,) = store.maintenance.fsck()
    assert (finding.level, finding.where, finding.what) == ("warning", "id 'a'", "names 2 rows")


def test_orphans_go_when_they_are_old_and_nothing_else_does(store: TrajectoryStore) -> None:
    store.maintenance.compact()
    before = sorted(store.path.iterdir())
    young, old = (store.path / f"part-{c * 32}.tmp" for c in "ab")
    for path in (young, old):
        path.write_bytes(b"x")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    found = {f.where: f.repaired for f in store.maintenance.fsck()}
    assert found == {young.name: False, old.name: False}
    found = {f.where: f.repaired for f in store.maintenance.fsck(repair=True)}
    assert found == {young.name: False, old.name: True}
    young.unlink()
    assert sorted(store.path.iterdir()) == before
    assert store.count() == 3
    assert json.dumps([f.what for f in store.maintenance.fsck()]) == "[]"


def newest(store: TrajectoryStore) -> Path:
    return store.path / entry(store.snapshot)


@pytest.mark.parametrize("kept", [1, 40, 0.5, -1])
@pytest.mark.parametrize("tail", [b"", b"\0" * 100], ids=["bare", "zeros"])
def test_a_torn_newest_entry_is_put_aside_and_its_batch_can_be_sent_again(
    store: TrajectoryStore, kept: float, tail: bytes
) -> None:
    store.append(rows("d"), writer_id="w", batch_no=0)
    whole = newest(store).read_bytes()
    cut = whole[: int(kept * len(whole)) if isinstance(kept, float) else kept]
    newest(store).write_bytes(cut + tail)
    data = set(store.path.glob("part-*"))
    with pytest.raises(CorruptFileError):
        TrajectoryStore.open(store.path)
    error, *others = fsck(store._place, orphan_seconds=0)
    assert (error.level, error.where, error.repaired) == ("error", entry(3), False)
    assert all("no snapshot uses it" in f.what for f in others)
    assert newest(store).exists()
    error, *others = fsck(store._place, repair=True, orphan_seconds=0)
    assert (error.where, error.repaired, [f.repaired for f in others]) == (entry(3), True, [False])
    again = TrajectoryStore.open(store.path)
    assert again.scan(columns=["id"]).to_arrow()["id"].to_pylist() == ["a", "b", "c"]
    (aside,) = (store.path / TORN).iterdir()
    assert aside.read_bytes() == cut + tail
    fsck(store._place, repair=True, orphan_seconds=0)
    named = {path for path in data if path.name.encode() in cut}
    assert set(store.path.glob("part-*")) >= named, "what the entry names stays"
    assert not again.append(rows("d"), writer_id="w", batch_no=0).already_in
    assert again.count() == 4


@pytest.mark.parametrize(
    "how", ["in its middle", "whole", "not the newest", "empty", "under a checkpoint", "first"]
)
def test_an_entry_that_is_not_torn_stays_where_it_is(store: TrajectoryStore, how: str) -> None:
    path, whole = newest(store), newest(store).read_bytes()
    if how == "in its middle":
        path.write_bytes(whole.replace(b'{"add"', b'{"add', 1))
    elif how == "not the newest":
        path = store.path / entry(1)
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "under a checkpoint":
        store._table._delta.create_checkpoint()
        path.write_bytes(whole[:-1])
    elif how == "first":
        other = TrajectoryStore.create(store.path / "other")
        path, store = newest(other), other
        path.write_bytes(path.read_bytes()[:-1])
    before = path.read_bytes()
    try:
        found = fsck(store._place, repair=True)
        assert not any("its end is missing" in f.what for f in found)
    except CorruptFileError:
        pass  # said, and left to a backup
    assert path.read_bytes() == before
    assert not (store.path / TORN).exists()


VERBS = {
    "append": lambda s: s.append(rows("d"), writer_id="w", batch_no=0),
    "compact": lambda s: s.maintenance.compact(),
    "delete": lambda s: s.maintenance.delete("id = 'a'"),
    "update": lambda s: s.maintenance.update(["a"], {"reward": [2.0]}),
    "add_column": lambda s: s.maintenance.add_column(Column("extra", pa.string())),
    "restore": lambda s: s.maintenance.restore(1),
}


@pytest.mark.parametrize("tail", [b"", b"\n" + b"\0" * 100], ids=["bare", "zeros"])
@pytest.mark.parametrize("verb", VERBS)
def test_an_entry_that_ends_between_two_lines_is_torn(store: TrajectoryStore, verb: str, tail: bytes) -> None:
    VERBS[verb](store)
    path = store.path / entry(3)
    lines = path.read_bytes().splitlines()
    for kept in range(1, len(lines)):
        path.write_bytes(b"\n".join(lines[:kept]) + tail)
        with pytest.raises(CorruptFileError, match="cannot be read"):
            TrajectoryStore.open(store.path)
        error, *others = fsck(store._place)
        assert (error.level, error.where, error.repaired) == ("error", entry(3), False)
        assert {f.level for f in others} <= {"warning"}
        assert fsck(store._place, repair=True)[0].repaired
        again = TrajectoryStore.open(store.path)
        assert again.scan(columns=["id"]).to_arrow()["id"].to_pylist() == ["a", "b", "c"]
    VERBS[verb](again)
    assert {f.level for f in fsck(store._place)} <= {"warning"}
    assert TrajectoryStore.open(store.path).snapshot == 3


def test_an_entry_cut_short_that_others_were_built_upon_is_told(store: TrajectoryStore) -> None:
    store.append(rows("d"), writer_id="w", batch_no=0)
    path = newest(store)
    store.append(rows("e"))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    before = path.read_bytes()
    (finding,) = fsck(store._place, repair=True)
    assert (finding.level, finding.where, finding.repaired) == ("error", entry(3), False)
    assert "later commits were built upon it" in finding.what
    assert path.read_bytes() == before


def test_an_old_entry_that_is_damaged_under_a_checkpoint_is_named(store: TrajectoryStore) -> None:
    store._table._delta.create_checkpoint()
    path = store.path / entry(1)
    path.write_bytes(path.read_bytes().replace(b'{"add":', b'{"add"', 1))
    with pytest.raises(CorruptFileError, match=f"{entry(1)} is damaged"):
        TrajectoryStore.open(store.path).scan().to_arrow()


@pytest.mark.parametrize("verb", ["append", "compact"])
def test_what_is_committed_stays_when_the_disk_fails_right_after(
    store: TrajectoryStore, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Place, number: int) -> None:
        raise OSError("input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Place, "sync_entry", fails)
        with pytest.raises(UncertainCommitError, match="whether a commit got into"):
            VERBS[verb](store)
    assert TrajectoryStore.open(store.path).snapshot == 3
    assert fsck(store._place) == []
    assert store.append(rows("d"), writer_id="w", batch_no=0).already_in == (verb == "append")
    assert store.count() == 4


def test_rows_are_not_lost_after_a_commit_of_unknown_outcome(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Place, number: int) -> None:
        raise OSError("input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Place, "sync_entry", fails)
        with pytest.raises(UncertainCommitError):
            store.append(rows("d"))
    assert not store.append(rows("e")).already_in
    assert store.count() == 5
