"""Group commit: many threads, few commits, nothing lost, errors told to whoever can act on them."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trajstore import ConflictError, InputError, StorageError, Trajectory, TrajectoryStore, ValidationError


def row(name: str) -> Trajectory:
    return Trajectory(id=name, tokens=[1, 2, 3], prompt_length=1)


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    return TrajectoryStore.create(tmp_path / "store")


def ids(store: TrajectoryStore) -> list[str]:
    return store.scan(columns=["id"]).to_arrow()["id"].to_pylist()  # type: ignore[no-any-return]


def test_many_threads_become_few_commits(store: TrajectoryStore) -> None:
    with store.writer(max_rows=50, max_age=3600) as writer:

        def work(k: int) -> None:
            for i in range(40):
                writer.add([row(f"{k}-{i}-a"), row(f"{k}-{i}-b")])

        threads = [threading.Thread(target=work, args=(k,)) for k in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.flush()
        metrics = writer.metrics()
        assert (metrics.rows, metrics.queued_rows, metrics.queued_bytes) == (400, 0, 0)
        assert metrics.bytes > 0
        assert 0 < metrics.commit_p50_ms <= metrics.commit_p99_ms
    assert sorted(ids(store)) == sorted(f"{k}-{i}-{x}" for k in range(5) for i in range(40) for x in "ab")
    assert metrics.commits == len(store.history()) - 1 <= 8
    for k in range(5):
        mine = [i for i in ids(store) if i.startswith(f"{k}-")]
        assert mine == [f"{k}-{i}-{x}" for i in range(40) for x in "ab"]


def test_rows_added_one_by_one_share_a_row_group(store: TrajectoryStore) -> None:
    with store.writer(max_rows=5000, max_age=3600) as writer:
        for i in range(150):
            writer.add(row(str(i)))
    (file,) = store.scan().data_files()
    assert pq.read_metadata(file).num_row_groups == 1


def test_age_commits_without_being_asked(store: TrajectoryStore) -> None:
    with store.writer(max_age=0.1) as writer:
        writer.add(row("a"))
        deadline = time.monotonic() + 300
        while writer.metrics().commits == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert (store.count(), writer.metrics().commits) == (1, 1)


def test_a_bad_row_is_the_error_of_who_gave_it(store: TrajectoryStore) -> None:
    with store.writer() as writer:
        writer.add(row("a"))
        with pytest.raises(ValidationError, match="trajectory 1"):
            writer.add([row("b"), Trajectory(id="bad", tokens=[-1])])
        writer.add(row("c"))
    assert ids(store) == ["a", "c"]


def test_a_failed_commit_surfaces_and_stays(store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = store.writer(max_age=3600)
    writer.add(row("a"))
    (store.path / "_delta_log").rename(store.path / "moved")
    with pytest.raises(StorageError, match="the commit could not be written"):
        writer.flush()
    (store.path / "moved").rename(store.path / "_delta_log")
    for call in (writer.flush, writer.close, lambda: writer.add(row("b"))):
        with pytest.raises(StorageError):
            call()
    assert store.count() == 0


def test_too_much_queued_makes_add_wait(store: TrajectoryStore) -> None:
    with store.writer(max_rows=5, max_age=3600) as writer:
        done = threading.Event()

        def work() -> None:
            for i in range(100):
                writer.add(row(str(i)))
                assert writer.metrics().queued_rows <= 10
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert done.is_set()
    assert ids(store) == [str(i) for i in range(100)]


def test_await_lets_others_run(store: TrajectoryStore) -> None:
    async def main() -> int:
        ticks = 0
        stop = asyncio.Event()

        async def tick() -> None:
            nonlocal ticks
            while not stop.is_set():
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        with store.writer(max_rows=4, max_age=3600) as writer:
            for i in range(30):
                await writer.add(row(str(i)))
            stop.set()
            await ticking
        return ticks

    assert asyncio.run(main()) > 30
    assert ids(store) == [str(i) for i in range(30)]


def test_a_named_writer_goes_on_after_a_restart(store: TrajectoryStore) -> None:
    for name in ("a", "b"):
        with TrajectoryStore.open(store.path).writer(writer_id="w") as writer:
            writer.add(row(name))
    assert ids(store) == ["a", "b"]
    assert [s.writer_id for s in store.history()[1:]] == ["w", "w"]


def test_a_second_process_under_one_name_is_told_and_loses_nothing_in_silence(store: TrajectoryStore) -> None:
    first, second = store.writer(writer_id="w"), store.writer(writer_id="w")
    first.add(row("a"))
    first.close()
    second.add(row("b"))
    with pytest.raises(ConflictError, match="another process writes as 'w'"):
        second.flush()
    with pytest.raises(ConflictError):
        second.close()
    assert ids(store) == ["a"]


def test_a_restore_under_a_writer_does_not_stop_it(store: TrajectoryStore) -> None:
    with store.writer(writer_id="w") as writer:
        for name in "abc":
            writer.add(row(name))
            writer.flush()
        store.maintenance.restore(1)
        writer.add(row("d"))
    with store.writer(writer_id="w") as writer:
        writer.add(row("e"))
    assert ids(store) == ["a", "d", "e"]
    seq = [n >> 32 for n in store.scan(columns=["writer_seq"]).to_arrow()["writer_seq"].to_pylist()]
    assert seq == [0, 3, 4]


def test_closed_and_pinned_and_limits(store: TrajectoryStore) -> None:
    writer = store.writer()
    writer.close()
    writer.close()
    with pytest.raises(InputError, match="closed"):
        writer.add(row("a"))
    with pytest.raises(InputError, match="pinned"):
        store.at(0).writer()
    with pytest.raises(InputError, match="max_rows is 0"):
        store.writer(max_rows=0)


SCRIPT = """
import sys, time
from trajstore import Trajectory, TrajectoryStore
writer = TrajectoryStore.open(sys.argv[1]).writer(max_age=3600, writer_id="w")
writer.add([Trajectory(id=f"flushed-{i}", tokens=[1]) for i in range(10)])
writer.flush()
writer.add([Trajectory(id=f"late-{i}", tokens=[1]) for i in range(10)])
print("ready", flush=True)
if len(sys.argv) > 2:
    time.sleep(3600)  # until it is killed
"""


def test_the_interpreters_exit_flushes(store: TrajectoryStore) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(store.path)], check=True, capture_output=True)
    assert len(ids(store)) == 20


def test_a_killed_process_loses_only_what_was_not_flushed(store: TrajectoryStore) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(store.path), "wait"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert ids(store) == [f"flushed-{i}" for i in range(10)]
    with store.writer(writer_id="w") as writer:
        writer.add(row("again"))
    assert len(ids(store)) == 11


def test_a_read_only_folder_is_a_storage_error(store: TrajectoryStore) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    store.path.chmod(0o500)
    try:
        with pytest.raises(StorageError):
            store.append([row("a")])
    finally:
        store.path.chmod(0o700)
