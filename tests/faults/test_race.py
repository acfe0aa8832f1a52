"""Writers, maintainers and a reader at once: nothing lost, nothing twice, no half batch is ever seen."""

import time
from pathlib import Path

import pyarrow as pa

from tests.faults.conftest import S3_WHEN_LONG, Where
from tests.faults.workers import DOOMED, KEPT, batches_in
from trajstore.schema import Column, list_of


def test_writers_maintainers_and_a_reader(where: Where) -> None:
    store = where.create()
    writers = where.count(disk=3, s3=2, soak=4)
    batches = where.count(disk=8, s3=3, soak=50)
    folder, workers = where.workers.folder, where.workers
    stop = folder / "stop"
    maintainers = [
        workers.start(
            "maintain",
            uri=where.uri,
            stop=stop,
            verbs=["compact", "delete", "vacuum"],
            ready=folder / f"m{m}",
        )
        for m in range(where.count(disk=2, s3=1, soak=2))
    ]
    running = [
        workers.start("write", uri=where.uri, writer=f"w{w}", progress=folder / f"w{w}.txt", batches=batches)
        for w in range(writers)
    ]
    reads, before = 0, {}
    while any(process.poll() is None for process in running):
        seen = batches_in(store)
        assert all(seen.get(writer, 0) >= number for writer, number in before.items()), (before, seen)
        known = {w: int(p.read_text()) for w in seen if (p := folder / f"{w}.txt").exists()}
        reads, before = reads + 1, seen
        again = batches_in(where.open())
        assert all(again[writer] >= number for writer, number in known.items()), "what was durable is there"
        workers.check()
        time.sleep(0.05 if where.kind == "disk" else 0.5)  # the S3 server is slow
    workers.finish(*running)
    store.maintenance.compact()  # a maintainer more
    stop.touch()
    workers.finish(*maintainers)
    store.maintenance.delete("reward = -1")
    assert batches_in(store) == {f"w{w}": batches for w in range(writers)}
    assert store.count() == writers * batches * KEPT
    history = store.history()
    done = [entry.operation for entry in history]
    assert done.count("append") == writers * batches
    assert sum(e.rows for e in history if e.operation == "delete") == -writers * batches * DOOMED
    assert done.count("compact") >= 1
    assert store.maintenance.fsck() == []
    print(f"{where.kind}: {writers} x {batches} appends, {reads} reads, {len(done)} commits")


@S3_WHEN_LONG
def test_two_processes_with_one_writer_id(where: Where) -> None:
    store = where.create()
    batches = where.count(disk=10, s3=3, soak=50)
    folder = where.workers.folder
    for name in ("a", "b"):
        where.workers.start(
            "write", uri=where.uri, writer="w", progress=folder / f"{name}.txt", batches=batches
        )
    where.workers.finish()
    assert batches_in(store) == {"w": batches}
    resent = [len(p.read_text().splitlines()) for p in folder.glob("*.resent")]
    assert sum(resent) == batches, "each batch was answered `already in` exactly once"
    assert store.maintenance.fsck() == []


@S3_WHEN_LONG
def test_columns_added_under_running_writers(where: Where) -> None:
    store = where.create()
    folder, stop = where.workers.folder, where.workers.folder / "stop"
    for w in ("a", "b"):
        where.workers.start("write", uri=where.uri, writer=w, progress=folder / f"{w}.txt", stop=stop)
    for number in range(where.count(disk=4, s3=2, soak=20)):
        least = {w: _sent(folder / f"{w}.txt") for w in ("a", "b")}
        where.workers.until(lambda least=least: all(_sent(folder / f"{w}.txt") > n for w, n in least.items()))
        store.maintenance.add_column(Column(f"extra{number}", list_of(pa.float32()), "token", pad=0.0))
    stop.touch()
    where.workers.finish()
    assert batches_in(store) == {w: _sent(folder / f"{w}.txt") for w in ("a", "b")}
    assert store.scan().to_arrow()[f"extra{number}"].null_count == store.count()
    assert store.maintenance.fsck() == []


def _sent(note: Path) -> int:
    return int(note.read_text()) if note.exists() else 0
