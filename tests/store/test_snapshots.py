"""Tags, times, differences and the training ledger: what was there, and what was trained on."""

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trajstore import ConflictError, QueryError, Trajectory, TrajectoryStore


def rows(*names: str) -> list[Trajectory]:
    return [Trajectory(id=name, tokens=[1]) for name in names]


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    made = TrajectoryStore.create(tmp_path / "store")
    for batch in (["a", "b"], ["c"], ["d", "e"]):
        made.append(rows(*batch))
    return made


def test_a_tag_names_a_snapshot_and_keeps_it_through_a_vacuum(store: TrajectoryStore) -> None:
    store.tag("step-1200", 2)
    store.tag("newest")
    store.tag("newest")
    assert store.tags() == {"step-1200": 2, "newest": 3}
    assert store.at("step-1200").count() == 3
    with pytest.raises(ConflictError, match="tag 'newest' is at snapshot 3"):
        store.tag("newest", 1)
    with pytest.raises(QueryError, match="no snapshot 40"):
        store.tag("x", 40)
    with pytest.raises(QueryError, match="there is no tag 'y'") as error:
        store.at("y")
    assert error.value.hint == "tags: step-1200, newest"
    store.maintenance.compact()
    removed = store.maintenance.vacuum(0, force=True)
    assert removed == []
    assert [t.id for t in store.at("step-1200").scan().to_trajectories()] == ["a", "b", "c"]


def test_at_a_time_is_the_newest_snapshot_up_to_then(store: TrajectoryStore) -> None:
    times = [s.timestamp for s in store.history()]
    assert store.at(datetime.now(UTC)).snapshot == 3
    for k in (1, 2, 3):
        assert store.at(times[k]).snapshot == max(
            s.snapshot for s in store.history() if s.timestamp <= times[k]
        )
    with pytest.raises(QueryError, match="younger"):
        store.at(times[0] - timedelta(days=1))
    with pytest.raises(QueryError, match="no time zone"):
        store.at(datetime(2030, 1, 1))  # the point of the test


def test_diff_names_what_came_and_went(store: TrajectoryStore) -> None:
    store.maintenance.delete("id = 'b' or id = 'd'")
    store.append(rows("f"))
    store.tag("now")
    diff = store.diff(1, "now")
    assert (diff.added, diff.removed) == (["c", "e", "f"], ["b"])
    assert store.diff(2, 2).added == []


def test_the_ledger_says_what_a_step_trained_on_and_keeps_it(store: TrajectoryStore) -> None:
    store.record_training_step(7, ["b", "a"], rank=1, snapshot=1)
    store.record_training_step(7, ["c"], rank=0, micro_batch=1)
    store.record_training_step(7, ["b", "a"], rank=1, snapshot=1)
    found = store.ledger().drop_columns("recorded_at").to_pylist()
    assert [tuple(r.values()) for r in found] == [
        (7, 0, 1, 0, "c", 3),
        (7, 1, 0, 0, "b", 1),
        (7, 1, 0, 1, "a", 1),
    ]
    store.maintenance.compact()
    store.maintenance.vacuum(0, force=True)
    assert store.at(1).count() == 2


def test_many_threads_note_steps_at_once(store: TrajectoryStore) -> None:
    def work(rank: int) -> None:
        for step in range(5):
            TrajectoryStore.open(store.path).record_training_step(step, ["a", "b"], rank=rank, snapshot=1)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.ledger()) == 3 * 5 * 2


def test_one_name_for_two_snapshots_at_once(store: TrajectoryStore) -> None:
    gate, told = threading.Barrier(3), []

    def work(snapshot: int) -> None:
        mine = TrajectoryStore.open(store.path)
        gate.wait()
        try:
            mine.tag("best", snapshot)
        except ConflictError:
            told.append(snapshot)

    threads = [threading.Thread(target=work, args=(snapshot,)) for snapshot in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted([*told, store.tags()["best"]]) == [1, 2, 3], "who was not first is told"


def test_a_tag_that_another_process_gave_meanwhile(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.tag("best", 1)
    seen = [{}, store.tags()]
    monkeypatch.setattr("trajstore.store.side.tags", lambda _: seen.pop(0))
    with pytest.raises(ConflictError, match="tag 'best' is at snapshot 1"):
        store.tag("best", 2)


def test_a_handle_appends_after_a_restore(store: TrajectoryStore) -> None:
    store.maintenance.restore(1)
    assert store.append(rows("f")).rows == 1
    store.append(rows("g"))
    assert store.scan(columns=["id"]).to_arrow()["id"].to_pylist() == ["a", "b", "f", "g"]
    assert store.maintenance.fsck() == []
