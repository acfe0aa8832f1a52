"""kill -9 at random moments and at chosen ones: a resend makes whole, and what is left over can be found."""

import json
import os
import random
import signal
import time

import pytest

from tests.faults.conftest import PATIENCE, S3_WHEN_LONG, Where
from tests.faults.workers import batches_in, write
from trajstore import TrajectoryStore
from trajstore.store.files import NAME
from trajstore.store.place import LOG


def _orphans(store: TrajectoryStore) -> set[str]:
    """Data files that no log entry ever named, found without the library's help."""
    place, known = store._place, set()
    entries = place.entries()
    for entry in entries:
        if entry.name.startswith(LOG) and entry.name.endswith(".json"):
            lines = map(json.loads, place.read(entry.name).splitlines())
            known |= {line["add"]["path"] for line in lines if "add" in line}
    return {e.name for e in entries if e.name.startswith("part-")} - known


def _sweep(store: TrajectoryStore, *, at_least: int = 0) -> int:
    """Orphans are listed, vacuumed, and no row goes with them."""
    left, rows = _orphans(store), store.count()
    assert len(left) >= at_least
    assert all(NAME.fullmatch(name) for name in left)
    found = store.maintenance.fsck()
    assert {f.where for f in found} == left
    assert {f.level for f in found} <= {"warning"}
    if store._place.folder is not None and left:  # fsck removes those that are old, vacuum the others
        old = sorted(left)[0]
        os.utime(store.path / old, (time.time() - 7200,) * 2)
        repaired = {f.where for f in store.maintenance.fsck(repair=True) if f.repaired}
        assert repaired == {old}
    assert left - set(store.maintenance.vacuum(0, force=True)) == (
        {sorted(left)[0]} if store._place.folder is not None and left else set()
    )
    assert store.maintenance.fsck(repair=True) == []
    assert _orphans(store) == set()
    assert store.count() == rows
    return len(left)


def test_writers_killed_at_random_moments(where: Where) -> None:
    store = where.create()
    folder, workers = where.workers.folder, where.workers
    stop, names = folder / "stop", ["w0", "w1", "w2"][: where.count(disk=2, s3=2, soak=3)]

    def start(name: str):
        (folder / f"{name}.ready").unlink(missing_ok=True)
        return workers.start("write", uri=where.uri, writer=name, progress=folder / f"{name}.txt", stop=stop)

    running = {name: start(name) for name in names}
    kills = where.count(disk=4, s3=2, soak=50)
    for number in range(kills):
        name = names[number % len(names)]
        workers.until((folder / f"{name}.ready").exists)
        time.sleep(random.uniform(0, 0.3))
        workers.kill(running[name])
        running[name] = start(name)
    for name in names:
        sent = (folder / f"{name}.txt").read_text() if (folder / f"{name}.txt").exists() else ""
        workers.until(lambda n=name, s=sent: (p := folder / f"{n}.txt").exists() and p.read_text() != s)
    stop.touch()
    workers.finish()
    sent = {name: int((folder / f"{name}.txt").read_text()) for name in names}
    assert batches_in(store) == sent
    for name in names:
        progress = folder / f"{name}.txt"
        progress.unlink()  # a writer that knows nothing any more sends all again
        write(where.open(), writer=name, progress=str(progress), batches=sent[name], patience=PATIENCE)
    assert batches_in(store) == sent
    assert sum(e.operation == "append" for e in store.history()) == sum(sent.values())
    resent = sum(len(p.read_text().splitlines()) for p in folder.glob("*.resent")) - sum(sent.values())
    swept = _sweep(store)
    assert batches_in(store) == sent
    print(f"{where.kind}: {kills} kills, {sum(sent.values())} batches, {resent} resends, {swept} orphans")


@S3_WHEN_LONG
@pytest.mark.parametrize("point", ["writing", "written", "committed"])
def test_a_writer_killed_at_this_point(where: Where, point: str) -> None:
    store = where.create()
    call = {"uri": where.uri, "writer": "w", "progress": where.workers.folder / "w.txt", "batches": 1}
    process = where.workers.start("write", die=point, **call)
    assert process.wait(PATIENCE) == -signal.SIGKILL, where.workers.said()
    where.workers.started.remove(process)
    assert store.count() == (7 if point == "committed" else 0)
    write(where.open(), writer="w", progress=str(call["progress"]), batches=1, patience=PATIENCE)
    assert batches_in(store) == {"w": 1}
    on_disk = where.kind == "disk" or point == "written"
    assert _sweep(store) == (1 if point != "committed" and on_disk else 0)
    assert batches_in(store) == {"w": 1}
    assert [e.operation for e in store.history()] == ["create", "append"]


@S3_WHEN_LONG
def test_maintainers_killed_at_random_moments(where: Where) -> None:
    store = where.create()
    folder, workers = where.workers.folder, where.workers
    stop, kills = folder / "stop", where.count(disk=3, s3=2, soak=25)
    writer = workers.start("write", uri=where.uri, writer="w", progress=folder / "w.txt", stop=stop)

    def start(number: int):
        ready = folder / f"m{number}"
        verbs = [["compact", "delete"], ["update", "compact"], ["delete", "update"]][number % 3]
        return ready, workers.start("maintain", uri=where.uri, stop=stop, verbs=verbs, ready=ready)

    following = start(0)
    for number in range(kills):
        ready, process = following
        following = start(number + 1)  # two at once, and one is always on its way
        workers.until(ready.exists)
        time.sleep(random.uniform(0, 0.4))
        workers.kill(process)
    workers.until(following[0].exists)
    stop.touch()
    workers.finish()
    assert writer.returncode == 0
    sent = {"w": int((folder / "w.txt").read_text())}
    assert batches_in(store) == sent
    done = [e.operation for e in store.history()]
    swept = _sweep(store)
    store.maintenance.compact()
    assert batches_in(store) == sent
    print(
        f"{where.kind}: {kills} maintainers killed, {sent['w']} batches, {len(done)} commits, {swept} orphans"
    )
