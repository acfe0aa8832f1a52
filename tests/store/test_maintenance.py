"""Compaction, deletes, updates, restores, vacuum: rows stay right, two maintainers never double them."""

import multiprocessing
import os
import time
from collections import Counter
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from trajstore import (
    CorruptFileError,
    InputError,
    LengthMismatchError,
    PolicyVersion,
    QueryError,
    SchemaError,
    Trajectory,
    TrajectoryStatus,
    TrajectoryStore,
    ValidationError,
)
from trajstore.query import fresh, stratified_sample
from trajstore.schema import Column, list_of
from trajstore.selection import GapOf
from trajstore.store.maintenance import MINIMUM_RETENTION_HOURS


def rollout(i: int, version: int | None = None) -> Trajectory:
    return Trajectory(
        id=f"row-{i}",
        tokens=[i, i + 1, i + 2],
        prompt_length=1,
        behavior_log_probs=[-0.5, -0.25],
        reward=float(i),
        version=None if version is None else PolicyVersion(version),
        status=TrajectoryStatus.COMPLETED,
    )


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    made = TrajectoryStore.create(tmp_path / "store")
    for k in range(6):
        made.append([rollout(10 * k + i, 9 - k + i % 2) for i in range(10)], writer_id="w", batch_no=k)
    return made


def ids(store: TrajectoryStore) -> list[str]:
    return store.scan(columns=["id"]).to_arrow()["id"].to_pylist()  # type: ignore[no-any-return]


def test_compaction_keeps_rows_order_and_samples(store: TrajectoryStore) -> None:
    rows, order = store.scan().to_trajectories(), ids(store)
    sample = stratified_sample(store.scan(), 12, by="version_id", seed=3).to_polars()["id"].sort()
    done = store.maintenance.compact()
    assert (done.files_removed, done.files_added, done.rows) == (6, 1, 0)
    assert len(store.scan().data_files()) == 1
    assert store.scan().to_trajectories() == rows
    assert ids(store) == order
    again = stratified_sample(store.scan(), 12, by="version_id", seed=3).to_polars()["id"].sort()
    assert again.equals(sample)
    stamped = store.scan().to_arrow()["ingest_snapshot"].to_pylist()
    assert stamped == [1 + k for k in range(6) for _ in range(10)]
    assert store.maintenance.compact().files_removed == 0
    assert store.append([rollout(99)], writer_id="w", batch_no=6).rows == 1
    assert ids(store)[-1] == "row-99"
    assert store.at(3).count() == 30


def test_compaction_leaves_files_of_half_the_target_and_more(store: TrajectoryStore) -> None:
    large = [rollout(100 + i, 3) for i in range(400)]
    store.append(large, writer_id="w", batch_no=6)
    sizes = {Path(file): Path(file).stat().st_size for file in store.scan().data_files()}
    largest = max(sizes, key=lambda file: sizes[file])
    store.maintenance.compact(target_bytes=2 * sizes[largest])
    assert largest in map(Path, store.scan().data_files())
    store.maintenance.compact(target_bytes=2 * sizes[largest] + 1)
    assert largest not in map(Path, store.scan().data_files())
    assert sorted(ids(store)) == sorted([f"row-{i}" for i in range(60)] + [row.id for row in large])


def test_compaction_orders_by_version_so_that_a_gate_skips(store: TrajectoryStore) -> None:
    store.maintenance.compact()
    stored = pa.parquet.read_table(store.scan().data_files()[0])
    versions = stored["oldest_version_id"].to_pylist()
    assert versions == sorted(versions)


def test_delete_takes_out_what_it_says(store: TrajectoryStore) -> None:
    done = store.maintenance.delete("reward >= 8 and reward < 21")
    assert done.rows == 13
    assert (done.files_removed, done.files_added) == (3, 2)
    assert ids(store) == [f"row-{i}" for i in range(60) if not 8 <= i < 21]
    assert store.maintenance.delete("reward < 0").rows == 0
    assert store.at(6).count() == 60
    with pytest.raises(QueryError, match="is a list"):
        store.maintenance.delete("tokens = 1")
    with pytest.raises(InputError, match="pinned"):
        _ = store.at(2).maintenance


def test_remove_stale_equals_the_gate_and_keeps_unknown_versions(store: TrajectoryStore) -> None:
    store.append([rollout(100), rollout(101, 2)])
    fresh_ids = {t.id for t in store.scan(where=fresh(at=10, max_staleness=4)).to_trajectories()}
    done = store.maintenance.remove_stale(PolicyVersion(10), 4)
    assert set(ids(store)) == fresh_ids | {"row-100"}
    assert done.rows == 62 - len(fresh_ids) - 1


def test_wholly_stale_files_go_by_the_log_alone(store: TrajectoryStore) -> None:
    files = {Path(name) for name in store.scan().data_files()}
    for name in files:  # unreadable: touching one would raise
        name.write_bytes(b"")
    assert store.maintenance.remove_stale(100, 5).rows == 60
    assert store.count() == 0


@pytest.mark.parametrize("gap_of", ["oldest", "start", "newest"])
def test_files_without_a_stale_row_are_not_opened(gap_of: GapOf, tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    for version in range(6):
        versions = [version, version + 1]
        store.append([Trajectory(response_tokens=[1], version=PolicyVersion(v)) for v in versions])
    for file, _ in store.scan("oldest_version_id >= 3").places():
        if file.low["oldest_version_id"] >= 3:
            (tmp_path / "store" / file.name).write_bytes(b"")  # touching it would raise
    done = store.maintenance.remove_stale(6, 3, gap_of=gap_of)
    assert (done.rows, done.files_removed, done.files_added) == (5, 3, 1)
    assert store.count() == 7


def test_update_sets_values_of_the_rows_named(store: TrajectoryStore) -> None:
    before = store.scan().to_trajectories()
    done = store.maintenance.update(
        ["row-41", "row-3"],
        {"advantages": [[0.5] * 3, [1.5] * 3], "log_probs_version": [7, None], "reward": [4.0, 2.0]},
    )
    assert (done.rows, done.files_removed, done.files_added) == (2, 2, 2)
    after = {t.id: t for t in store.scan().to_trajectories()}
    assert after["row-41"].advantages == [0.5] * 3
    assert after["row-3"].advantages == [1.5] * 3
    assert (after["row-41"].log_probs_version, after["row-3"].log_probs_version) == (7, None)
    assert (after["row-41"].reward, after["row-3"].reward) == (4.0, 2.0)
    assert [after[t.id] for t in before if t.id not in ("row-41", "row-3")] == [
        t for t in before if t.id not in ("row-41", "row-3")
    ]
    assert ids(store) == [t.id for t in before]


def test_update_refuses_what_would_break_a_row(store: TrajectoryStore) -> None:
    snapshot, files = store.snapshot, sorted(store.path.glob("part-*"))
    update = store.maintenance.update
    with pytest.raises(LengthMismatchError, match="'advantages': has 2 values, expected 3"):
        update(["row-3"], {"advantages": [[0.5, 0.5]]})
    with pytest.raises(ValidationError, match="'row-x' is not in the store"):
        update(["row-x"], {"reward": [1.0]})
    with pytest.raises(QueryError, match="'tokens' cannot be updated"):
        update(["row-3"], {"tokens": [[1, 2, 3]]})
    with pytest.raises(QueryError, match="has 1 values for 2 ids"):
        update(["row-3", "row-4"], {"reward": [1.0]})
    with pytest.raises(ValidationError, match="does not fit"):
        update(["row-3"], {"reward": ["much"]})
    store.append([rollout(3)])
    with pytest.raises(ValidationError, match="'row-3' names 2 rows"):
        update(["row-3"], {"reward": [1.0]})
    assert store.snapshot == snapshot + 1
    assert len(list(store.path.glob("part-*"))) == len(files) + 1


def test_added_columns_are_null_in_old_rows_and_take_updates(store: TrajectoryStore) -> None:
    entropy = Column("entropy", list_of(pa.float32()), "token", pad=-1.0)
    store.maintenance.add_column(entropy)
    store.append([rollout(70)])
    assert store.scan().to_arrow()["entropy"].null_count == 61
    store.maintenance.update(["row-5"], {"entropy": [[1.0, 2.0, 3.0]]})
    found = dict(
        zip(ids(store), store.scan(columns=["entropy"]).to_arrow()["entropy"].to_pylist(), strict=True)
    )
    assert found["row-5"] == [1.0, 2.0, 3.0]
    assert sum(v is not None for v in found.values()) == 1
    with pytest.raises(SchemaError, match="already there"):
        store.maintenance.add_column(entropy)
    assert store.maintenance.compact().files_added == 1
    assert store.scan().to_arrow()["entropy"].null_count == 60


def test_restore_goes_back_and_what_was_rolled_back_may_be_sent_again(store: TrajectoryStore) -> None:
    kept = ids(store.at(3))
    store.maintenance.delete("reward < 5")
    store.maintenance.restore(3)
    assert ids(store) == kept
    assert store.append([rollout(0)], writer_id="w", batch_no=2).already_in
    again = store.append([rollout(30 + i, 5) for i in range(10)], writer_id="w", batch_no=3)
    assert (again.already_in, again.rows) == (False, 10)
    assert store.append([rollout(0)], writer_id="w", batch_no=3).already_in
    store.append([rollout(200)], writer_id="new", batch_no=0)
    assert store.count() == 41
    store.maintenance.restore(2)
    assert store.count() == 20
    assert not store.append([rollout(201)], writer_id="w", batch_no=2).already_in
    assert [s.operation for s in store.history()][7:9] == ["delete", "restore"]


def test_vacuum_keeps_what_is_kept_and_a_restore_of_the_rest_says_so(store: TrajectoryStore) -> None:
    store.append([Trajectory(id="bad", tokens=[-1]), rollout(60)], on_error="quarantine")
    store.maintenance.compact()
    (store.path / f"part-{'d' * 32}.tmp").write_bytes(b"x")
    (store.path / "README.md").write_text("mine")
    with pytest.raises(QueryError, match="may remove files"):
        store.maintenance.vacuum(1)
    named = store.maintenance.vacuum(0, dry_run=True, force=True)
    assert len(named) == 8
    assert store.at(7).scan().to_arrow().num_rows == 61
    removed = store.maintenance.vacuum(0, keep=[2], force=True)
    assert len(removed) == 6
    assert ids(store.at(2)) == [f"row-{i}" for i in range(20)]
    assert store.count() == 61
    assert len(store.quarantined()) == 1
    assert (store.path / "README.md").exists()
    with pytest.raises(CorruptFileError, match="cannot be restored"):
        store.maintenance.restore(4)


def test_vacuum_counts_the_age_of_a_file_from_when_it_left(store: TrajectoryStore) -> None:
    """Written weeks ago and compacted a moment ago: whoever reads the snapshot before needs it still."""
    files = [Path(file) for file in store.scan().data_files()]
    for file in files:
        os.utime(file, times=(time.time() - 30 * 86400,) * 2)
    before = store.at(6)
    store.maintenance.compact()
    assert store.maintenance.vacuum(MINIMUM_RETENTION_HOURS) == []
    assert len(before.scan().to_trajectories()) == 60
    removed = store.maintenance.vacuum(0, force=True)
    assert sorted(removed) == sorted(file.name for file in files)


def _maintain(path: str, stop: Event) -> None:
    store = TrajectoryStore.open(path)
    while not stop.is_set():
        store.maintenance.compact()
        store.maintenance.delete("reward = -1")


def _write(path: str, writer: int, enough: Event, written: SimpleQueue[tuple[int, int]]) -> None:
    store = TrajectoryStore.open(path)
    batches = 0
    while batches < 12 or not enough.is_set():
        rows = [rollout(10000 * writer + 10 * batches + j) for j in range(5)]
        doomed = Trajectory(id=f"doomed-{writer}-{batches}", tokens=[1], reward=-1.0)
        store.append([*rows, doomed], writer_id=f"writer-{writer}", batch_no=batches)
        batches += 1
    written.put((writer, batches))


def test_two_maintainers_and_two_writers_lose_and_double_nothing(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    context = multiprocessing.get_context("spawn")
    enough, stop, written = context.Event(), context.Event(), context.SimpleQueue()
    path = str(store.path)
    maintainers = [context.Process(target=_maintain, args=(path, stop)) for _ in range(2)]
    writers = [context.Process(target=_write, args=(path, w, enough, written)) for w in (1, 2)]
    for process in (*maintainers, *writers):
        process.start()
    give_up = time.monotonic() + 900
    try:
        while any(process.is_alive() for process in writers):
            seen = [i for i in ids(store) if not i.startswith("doomed")]
            assert len(seen) == len(set(seen))
            assert len(seen) % 5 == 0
            done = Counter(s.operation for s in store.history())
            if (done["compact"] > 1 and done["delete"] > 1) or time.monotonic() > give_up:
                enough.set()
            time.sleep(0.05)
    finally:
        enough.set()
        stop.set()
        for process in (*maintainers, *writers):
            process.join()
    assert [process.exitcode for process in (*maintainers, *writers)] == [0, 0, 0, 0]
    store.maintenance.delete("reward = -1")
    batches = dict(written.get() for _ in writers)
    wanted = {f"row-{10000 * w + 10 * k + j}" for w in (1, 2) for k in range(batches[w]) for j in range(5)}
    found = ids(store)
    assert len(found) == len(wanted)
    assert set(found) == wanted
    operations = [s.operation for s in store.history()]
    assert operations.count("compact") > 1
    assert operations.count("delete") > 1
    assert np.unique(operations).tolist() == ["append", "compact", "create", "delete"]
