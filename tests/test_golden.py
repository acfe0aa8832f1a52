"""A store that version 1 of the format wrote reads as it did: files here are added, never changed."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from trajstore import Trajectory, TrajectoryStore
from trajstore.query import connect

GOLDEN = Path(__file__).parent / "golden"
V1 = GOLDEN / "v1"
EXPECTED = json.loads((V1 / "expected.json").read_text())


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    shutil.copytree(V1 / "store", tmp_path / "store")
    return TrajectoryStore.open(tmp_path / "store")


def test_no_golden_file_was_changed() -> None:
    listed = dict(reversed(line.split("  ")) for line in (V1 / "SHA256").read_text().splitlines())
    found = {str(p.relative_to(V1)): p for p in V1.rglob("*") if p.is_file() and p.name != "SHA256"}
    assert set(found) == set(listed)
    for name, path in found.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[name], name


def test_every_snapshot_reads_as_it_was(store: TrajectoryStore) -> None:
    assert [[s.snapshot, s.operation, s.rows, s.writer_id] for s in store.history()] == EXPECTED["history"]
    for number, rows in EXPECTED["snapshots"].items():
        found = store.at(int(number)).scan().to_trajectories()
        assert str([t.to_dict() for t in found]) == str(rows)  # as text, where NaN equals NaN
        assert str([Trajectory.from_dict(row) for row in rows]) == str(found)


def test_extra_columns_tags_ledger_and_quarantine(store: TrajectoryStore) -> None:
    assert store.scan(columns=["id", "entropy", "task"]).to_arrow().to_pylist() == EXPECTED["extra"]
    assert store.tags() == EXPECTED["tags"]
    assert store.ledger().drop_columns("recorded_at").to_pylist() == EXPECTED["ledger"]
    assert store.quarantined()["id"].to_pylist() == ["bad"]
    assert store.extra[0].pad == -1.0


def test_it_is_sound_and_goes_on(store: TrajectoryStore) -> None:
    assert store.maintenance.fsck() == []
    assert store.append([Trajectory(id="x")], writer_id="golden", batch_no=1).already_in
    assert store.append([Trajectory(id="new", tokens=[1])], writer_id="golden", batch_no=2).rows == 1
    assert connect(store).sql("select count(*) n from trajectories where not isnan(reward)").to_pylist() == [
        {"n": len(EXPECTED["extra"]) + 1 - 1}
    ]
    store.maintenance.restore(1)
    assert store.count() == len(EXPECTED["snapshots"]["1"])


def test_columns_of_version_1_stay_and_new_ones_are_nullable() -> None:
    current = {c["name"]: c for c in json.loads(_current())["columns"]}
    for column in json.loads((V1 / "trajectory.v1.json").read_text())["columns"]:
        now = current.pop(column["name"])
        assert {k: v for k, v in now.items() if k != "doc"} == {k: v for k, v in column.items() if k != "doc"}
    assert all(column["nullable"] for column in current.values())


def _current() -> str:
    return (GOLDEN.parents[1] / "schemas" / "trajectory.v1.json").read_text()
