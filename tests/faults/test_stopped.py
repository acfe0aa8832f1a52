"""A writer that sleeps through a vacuum, a restore under a writer, a vacuum next to side tables."""

import os
import signal

import pytest

from tests.faults.conftest import PATIENCE, S3_WHEN_LONG, Where
from tests.faults.workers import batch, batches_in, write
from trajstore import CorruptFileError, Trajectory


def test_a_vacuum_while_a_writer_is_stopped_before_its_commit(disk: Where) -> None:
    store = disk.create()
    answer = disk.workers.folder / "answer"
    process = disk.workers.start("stopped", uri=disk.uri, writer="w", answer=answer)
    pid, status = os.waitpid(process.pid, os.WUNTRACED)
    assert pid == process.pid
    assert os.WIFSTOPPED(status), disk.workers.said()
    assert len(list(store.path.glob("part-*.parquet"))) == 1
    removed = store.maintenance.vacuum(0, force=True)
    assert len(removed) == 1
    assert store.count() == 0
    process.send_signal(signal.SIGCONT)
    disk.workers.finish(process)
    assert answer.read_text().startswith("ConflictError"), answer.read_text()
    assert "went away before its commit" in answer.read_text()
    assert batches_in(store) == {"w": 1}
    assert store.maintenance.fsck() == []
    assert len(list(store.path.glob("part-*"))) == 1


def test_a_vacuum_while_a_maintainer_is_stopped_before_its_commit(disk: Where) -> None:
    store = disk.create()
    for number in range(3):
        store.append(batch("w", number), writer_id="w", batch_no=number)
    answer = disk.workers.folder / "answer"
    process = disk.workers.start("stopped_compaction", uri=disk.uri, answer=answer)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), disk.workers.said()
    assert len(store.maintenance.vacuum(0, force=True)) == 1
    process.send_signal(signal.SIGCONT)
    disk.workers.finish(process)
    assert batches_in(store) == {"w": 3}
    assert answer.read_text() == "compacted" or answer.read_text().startswith("ConflictError")
    assert store.maintenance.fsck() == []


def test_a_writer_stopped_while_others_go_on(disk: Where) -> None:
    store = disk.create()
    answer = disk.workers.folder / "answer"
    process = disk.workers.start("stopped", uri=disk.uri, writer="w", answer=answer)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), disk.workers.said()
    for number in range(25):  # past a checkpoint
        store.append(batch("other", number), writer_id="other", batch_no=number)
    store.maintenance.compact()
    store.maintenance.vacuum(1, force=True)
    process.send_signal(signal.SIGCONT)
    disk.workers.finish(process)
    assert answer.read_text() == "committed"
    assert batches_in(store) == {"other": 25, "w": 1}
    assert store.maintenance.fsck() == []


@S3_WHEN_LONG
def test_what_a_restore_rolled_back_is_accepted_once_more(where: Where) -> None:
    store = where.create()
    note = where.workers.folder / "w.txt"

    def send(first: int, upto: int) -> list[int]:
        """Batches that were answered `already in`."""
        note.write_text(str(first))
        note.with_suffix(".resent").unlink(missing_ok=True)
        write(where.open(), writer="w", progress=str(note), batches=upto, patience=PATIENCE)
        told = note.with_suffix(".resent")
        return [int(n) for n in told.read_text().split()] if told.exists() else []

    assert send(0, 6) == []
    store.maintenance.compact()
    store.maintenance.restore(3)
    assert batches_in(store) == {"w": 3}
    assert send(0, 6) == [0, 1, 2]
    assert batches_in(store) == {"w": 6}
    assert send(0, 7) == [0, 1, 2, 3, 4, 5]
    assert batches_in(store) == {"w": 7}
    assert sum(e.operation == "append" for e in store.history()) == 10
    assert store.maintenance.fsck() == []


@S3_WHEN_LONG
def test_a_vacuum_leaves_side_tables_and_tagged_snapshots(where: Where) -> None:
    store = where.create()
    for number in range(3):
        store.append(batch("w", number), writer_id="w", batch_no=number)
    store.append([Trajectory(id="bad", tokens=[-1])], on_error="quarantine")
    store.tag("two", 2)
    store.record_training_step(7, ["w/0/keep0", "w/0/keep1"], snapshot=1)
    for number in range(3, 6):
        store.append(batch("w", number), writer_id="w", batch_no=number)
    store.maintenance.delete("reward = -1")
    store.maintenance.compact()
    store.record_training_step(8, ["w/5/keep0"])
    rolled = store.snapshot - 1
    removed = store.maintenance.vacuum(0, force=True)
    assert len(removed) == 10  # 4 files as appended, 6 as rewritten
    again = where.open()
    assert batches_in(again) == {"w": 6}
    assert batches_in(again.at("two")) == {"w": 2}
    assert batches_in(again.at(1)) == {"w": 1}
    with pytest.raises(CorruptFileError, match="vacuumed"):
        again.at(rolled).scan().to_arrow()
    assert again.tags() == {"two": 2}
    assert again.ledger()["id"].to_pylist() == ["w/0/keep0", "w/0/keep1", "w/5/keep0"]
    assert again.quarantined()["id"].to_pylist() == ["bad"]
    assert again.maintenance.fsck() == []
    again.maintenance.restore(2)
    assert batches_in(again) == {"w": 2}
