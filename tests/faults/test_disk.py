"""What a disk, a clock and a fork can do to a store, each with its stated outcome."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import S3_WHEN_LONG, Where
from tests.faults.workers import batch, batches_in
from trajstore import CorruptFileError, TrajectoryStore, TrajstoreError


def _fill(store: TrajectoryStore, count: int) -> None:
    for number in range(count):
        store.append(batch("w", number), writer_id="w", batch_no=number)


def _refused(disk: Where, limit: int) -> dict[str, Any]:
    answer = disk.workers.folder / "answer"
    disk.workers.start("small", uri=disk.uri, limit=limit, answer=answer)
    disk.workers.finish()
    return json.loads(answer.read_text())


@pytest.mark.parametrize("limit", [0, 1000, 8000])
def test_a_disk_that_takes_no_more_of_a_file(disk: Where, limit: int) -> None:
    store = disk.create()
    found = _refused(disk, limit)
    assert found["said"].startswith("refused: "), found
    assert found["count"] == 7
    assert batches_in(store) == {"w": 2}
    assert [f for f in store.maintenance.fsck() if f.level == "error"] == []
    print(found)


def test_a_disk_that_takes_no_more_of_a_file_has_nothing_half_written(disk: Where) -> None:
    disk.create()
    assert _refused(disk, 1000)["left"] == []


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("may not mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(tiny: Path) -> None:
    store, sent, refused = _squeezed(tiny)
    assert refused
    assert sent > 1
    store.append(batch("w", sent), writer_id="w", batch_no=sent)
    assert batches_in(store) == {"w": sent + 1}
    assert [f for f in store.maintenance.fsck() if f.level == "error"] == []
    print(f"{sent} appends, refused by {refused}")


def test_a_full_disk_has_nothing_half_written(tiny: Path) -> None:
    store, _, _ = _squeezed(tiny)
    assert store.maintenance.fsck() == []


def _squeezed(tiny: Path) -> tuple[TrajectoryStore, int, set[str]]:
    """A store that was appended to with less and more room; how many batches it took, and the refusals."""
    store = TrajectoryStore.create(tiny / "store")
    _fill(store, 1)
    ballast, sent, refused = tiny / "ballast", 1, set()
    for free in [*range(0, 64, 4), 128]:
        _leave(ballast, free << 10)
        try:
            store.append(batch("w", sent), writer_id="w", batch_no=sent)
            sent += 1
        except (TrajstoreError, OSError) as error:
            refused.add(type(error).__name__)
        ballast.unlink()
        assert batches_in(TrajectoryStore.open(store.path)) == {"w": sent}
        assert batches_in(store) == {"w": sent}
    return store, sent, refused


def _leave(ballast: Path, free: int) -> None:
    """Fills a disk but for so many bytes."""
    with ballast.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(4096))
        except OSError:
            out.truncate(out.tell() // 4096 * 4096 - free)


def _entry(store: TrajectoryStore, number: int) -> Path:
    return store.path / "_delta_log" / f"{number:020d}.json"


def test_a_torn_last_entry_of_the_log(disk: Where) -> None:
    store = disk.create()
    _fill(store, 3)
    other = disk.open()
    last = _entry(store, store.snapshot)
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    with pytest.raises(CorruptFileError, match=r"the log of .* cannot be read"):
        disk.open()
    assert other.snapshot == 3
    # The entry was never acknowledged, for that takes an fsync: without it the batch can be sent again.
    last.unlink()
    again = disk.open()
    assert batches_in(again) == {"w": 2}
    again.append(batch("w", 2), writer_id="w", batch_no=2)
    assert batches_in(again) == {"w": 3}


def test_an_empty_last_entry_of_the_log(disk: Where) -> None:
    store = disk.create()
    _fill(store, 3)
    _entry(store, 3).write_bytes(b"")
    again = disk.open()  # Delta takes it for a commit of nothing
    assert batches_in(again) == {"w": 2}
    commit = again.append(batch("w", 2), writer_id="w", batch_no=2)
    assert (commit.snapshot, commit.already_in) == (4, False)
    assert batches_in(disk.open()) == {"w": 3}
    (finding,) = again.maintenance.fsck()
    assert (finding.level, "no snapshot uses it" in finding.what) == ("warning", True)


def test_the_history_after_an_empty_entry_has_the_right_numbers(disk: Where) -> None:
    store = disk.create()
    _fill(store, 3)
    _entry(store, 3).write_bytes(b"")
    store = disk.open()
    store.append(batch("w", 2), writer_id="w", batch_no=2)
    assert [(e.snapshot, e.operation) for e in store.history() if e.operation == "create"] == [(0, "create")]


def test_a_snapshot_before_a_torn_entry_can_still_be_read(disk: Where) -> None:
    store = disk.create()
    _fill(store, 3)
    last = _entry(store, 3)
    last.write_bytes(last.read_bytes()[:100])
    assert batches_in(store.at(2)) == {"w": 2}


def test_a_log_torn_under_an_open_handle(disk: Where) -> None:
    store, other = disk.create(), disk.open()
    _fill(other, 1)
    _entry(store, 1).write_bytes(_entry(store, 1).read_bytes()[:100])
    with pytest.raises(CorruptFileError, match="the log of"):
        store.count()
    with pytest.raises(CorruptFileError, match="the log of"):
        store.append(batch("v", 0), writer_id="v", batch_no=0)
    assert len(list(store.path.glob("part-*"))) == 1, "the refused append left nothing"


def test_a_missing_data_file(disk: Where) -> None:
    store = disk.create()
    _fill(store, 3)
    gone = Path(store.scan().data_files()[1])
    gone.unlink()
    with pytest.raises(CorruptFileError, match=gone.name):
        store.scan().to_arrow()
    with pytest.raises(CorruptFileError, match=gone.name):
        store.maintenance.compact()
    (finding,) = store.maintenance.fsck(repair=True)
    assert (finding.level, finding.where, finding.repaired) == ("error", gone.name, False)
    assert len(list(store.path.glob("part-*"))) == 2, "the compaction that failed left nothing"
    store.append(batch("w", 3), writer_id="w", batch_no=3)
    store.maintenance.restore(1)
    assert batches_in(store) == {"w": 1}
    assert store.maintenance.fsck() == []


def test_a_flipped_byte(disk: Where) -> None:
    store = disk.create()
    _fill(store, 3)
    path = Path(store.scan().data_files()[1])
    sound = path.read_bytes()
    for at in (10, len(sound) // 2, len(sound) - 20):
        broken = bytearray(sound)
        broken[at] ^= 0x10
        path.write_bytes(broken)
        (finding,) = store.maintenance.fsck()
        assert (finding.level, finding.where) == ("error", path.name)
        assert "digest" in finding.what
    path.write_bytes(sound)
    assert store.maintenance.fsck() == []


def test_a_clock_that_goes_backwards(disk: Where) -> None:
    store = disk.create()
    folder = disk.workers.folder
    store.append(batch("first", 0), writer_id="first", batch_no=0)
    disk.workers.start("yesterday", uri=disk.uri, writer="behind", progress=folder / "b.txt", batches=3)
    disk.workers.finish()
    store.append(batch("last", 0), writer_id="last", batch_no=0)

    def order() -> list[str]:
        names = store.scan(columns=["id"]).to_arrow()["id"].to_pylist()
        return list(dict.fromkeys(name.rpartition("/")[0] for name in names))

    wanted = ["first/0", "behind/0", "behind/1", "behind/2", "last/0"]
    assert order() == wanted
    stamps = store.scan(columns=["ingested_at"]).to_arrow()["ingested_at"].to_pylist()
    assert stamps != sorted(stamps), "the clock did go backwards"
    store.maintenance.compact()
    assert order() == wanted
    store.maintenance.vacuum(0, force=True)
    assert batches_in(store) == {"first": 1, "behind": 3, "last": 1}
    assert store.maintenance.fsck() == []


def test_a_fork_after_open(disk: Where) -> None:
    store = disk.create()
    answer = disk.workers.folder / "answer"
    disk.workers.start("fork", uri=disk.uri, answer=answer)
    disk.workers.finish()
    outcome = json.loads(answer.read_text())
    print(outcome)
    assert all("Forked process detected" in said for said in outcome.values()), outcome
    assert batches_in(store) == {"w": 2}
    assert store.maintenance.fsck() == []


@S3_WHEN_LONG
def test_creates_at_once(where: Where) -> None:
    folder, workers = where.workers.folder, where.workers
    rounds, many = where.count(disk=6, s3=2, soak=50), 3
    for me in range(many):
        workers.start("create", uri=where.uri, rounds=rounds, me=me, folder=folder)
    for number in range(rounds):
        workers.until(lambda n=number: len(list(folder.glob(f"ready-{n}-*"))) == many)
        (folder / f"go-{number}").touch()
        workers.until(lambda n=number: len(list(folder.glob(f"said-{n}-*[0-9]"))) == many)
        said = sorted(p.read_text() for p in folder.glob(f"said-{number}-*[0-9]"))
        assert said == ["StoreExistsError"] * (many - 1) + ["created"]
        store = TrajectoryStore.open(f"{where.uri}-{number}", storage_options=workers.options)
        assert [e.operation for e in store.history()] == ["create"]
    workers.finish()
    store.append(batch("w", 0), writer_id="w", batch_no=0)
    assert batches_in(store) == {"w": 1}
