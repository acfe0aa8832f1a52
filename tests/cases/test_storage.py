"""Theme: files, folders and other writers (cases W*, X05, D05, D06)."""

import multiprocessing
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from trajstore import CorruptFileError, ImportFormatError, InputError, Trajectory, TrajectoryStore
from trajstore.ingest import ingest
from trajstore.loader import TrajectoryLoader
from trajstore.query import connect
from trajstore.store import Place


def rows(first: int, count: int) -> list[Trajectory]:
    return [Trajectory(id=f"r{i}", tokens=[i, 1, 2], prompt_length=1) for i in range(first, first + count)]


def test_W02_vacuum_leaves_commits_in_progress_readers_and_foreign_files_alone(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(rows(0, 3))
    reader = store.scan()
    in_flight = store.path / f"part-{'a' * 32}-{'b' * 16}.parquet"
    in_flight.write_bytes(b"x")
    foreign = store.path / "notes.parquet"
    foreign.write_bytes(b"x")
    store.maintenance.delete("id = 'r0'")
    assert store.maintenance.vacuum() == []
    assert [t.id for t in reader.to_trajectories()] == ["r0", "r1", "r2"]
    assert store.maintenance.vacuum(0, force=True)
    assert foreign.exists()
    assert not in_flight.exists()
    with pytest.raises(CorruptFileError, match="its snapshot was vacuumed"):
        store.at(1).scan().to_trajectories()
    assert store.count() == 2


def test_W03_unsafe_renames_are_never_set_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place.of("s3://bucket/x", {"AWS_REGION": "us-east-1"})
    assert not any("UNSAFE" in name for name in place.options)
    for options in ({"AWS_S3_ALLOW_UNSAFE_RENAME": "true"}, None):
        monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")
        with pytest.raises(InputError, match="overwrite each other's commits"):
            Place.of("s3://bucket/x", options)


FULL_DISK = """
import resource, signal, sys
from trajstore import Trajectory, TrajectoryStore
store = TrajectoryStore.open(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
import random
words = ["".join(random.choices("abcdefgh", k=400)) for _ in range(4000)]
try:
    store.append([Trajectory(id=str(i), response=w) for i, w in enumerate(words)])
except OSError as error:
    print("refused:", error)
"""


def test_W04_a_full_disk_costs_nothing_that_was_there(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(rows(0, 3))
    before = sorted(store.path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(store.path)], capture_output=True, text=True, check=True
    )
    assert "refused:" in done.stdout
    assert "too large" in done.stdout
    assert sorted(store.path.iterdir()) == before
    assert [t.id for t in TrajectoryStore.open(store.path).scan().to_trajectories()] == ["r0", "r1", "r2"]


def test_W05_broken_shards_are_named_and_foreign_files_ignored(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    for k in range(10):
        store.append(rows(10 * k, 2))
    (store.path / "s9.parquet.tmp").write_bytes(b"x")
    (store.path / "empty.parquet").write_bytes(b"")
    (store.path / "README.md").write_text("x")
    assert len(store.scan().to_trajectories()) == 20
    files = [Path(name) for name in store.scan().data_files()]
    files[7].write_bytes(files[7].read_bytes()[:100])
    files[8].write_bytes(b"")
    with pytest.raises(CorruptFileError, match=files[7].name):
        store.scan().to_arrow()
    assert {f.where for f in store.maintenance.fsck()} == {files[7].name, files[8].name}


def test_W05_an_import_of_broken_shards_names_them_and_can_skip_them(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for k in range(10):
        store = TrajectoryStore.create(tmp_path / f"s{k}")
        store.append(rows(10 * k, 2))
        (made,) = store.scan().data_files()
        (folder / f"s{k}.parquet").write_bytes(Path(made).read_bytes())
    (folder / "s7.parquet").write_bytes((folder / "s7.parquet").read_bytes()[:-100])
    (folder / "s8.parquet").write_bytes(b"")
    (folder / "s9.parquet.tmp").write_bytes(b"PAR1 half")
    (folder / "README.md").write_text("x")
    with pytest.raises(ImportFormatError, match=r"s7\.parquet: not a whole Parquet file"):
        ingest(folder, tmp_path / "stopped")
    report = ingest(folder, tmp_path / "t", on_error="skip")
    assert report.commit.rows == 16
    assert [Path(where).name for where, _ in report.refused] == ["s7.parquet"]
    assert dict(report.left_out).keys() == {"README.md", "s8.parquet", "s9.parquet.tmp"}
    assert dict(report.left_out)["s8.parquet"] == "is empty"


@pytest.mark.parametrize(
    "name", ["run [a] ü 空/x", "it's/x", "a#b/x", "50% off/x", "a?b/x", "step=5/x", "u/_run/.hid/x"]
)
def test_W06_paths_of_any_kind_work(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    TrajectoryStore.create(path).append(rows(0, 4))
    store = TrajectoryStore.open(path)
    assert store.scan(where="id <> 'r1'").count() == 3
    assert connect(store).sql("select count(*) n from trajectories").to_pylist() == [{"n": 4}]
    assert "step" not in store.scan().to_arrow().schema.names
    store.append(rows(4, 1))
    assert store.maintenance.compact().files_added == 1
    assert len(list(TrajectoryLoader(store.scan(), batch_size=2))) == 3
    assert store.maintenance.fsck() == []


def test_W06_a_path_that_delta_misreads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a per cent sign and two hex digits"):
        TrajectoryStore.create(tmp_path / "a%20b" / "x")
    assert not list(tmp_path.iterdir())


def test_W06_import_makes_such_paths(tmp_path: Path) -> None:
    source = tmp_path / "it's [a].jsonl"
    source.write_text('{"id": "a", "tokens": [1]}\n')
    ingest(source, tmp_path / "run [ü] 100%" / "it's")
    assert TrajectoryStore.open(tmp_path / "run [ü] 100%" / "it's").count() == 1


def _append(path: str, barrier: object) -> None:
    store = TrajectoryStore.open(path)
    barrier.wait()  # type: ignore[attr-defined]
    store.append(rows(0, 100))


def test_W08_two_ranks_with_the_same_settings_keep_all_rows(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    ranks = [context.Process(target=_append, args=(str(store.path), barrier)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert store.count() == 200
    assert len({Path(name).name for name in store.scan().data_files()}) == 2


def test_W11_every_engine_counts_the_same_rows(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "_debug" / ".hidden" / "s")
    store.append([*rows(0, 2), Trajectory(id="bad", tokens=[-1])], on_error="quarantine")
    store.append(rows(2, 1))
    files = store.scan().data_files()
    assert not any(Path(name).name.startswith(("_", ".")) for name in files)
    whole_folder = pads.dataset(str(store.path), format="parquet", exclude_invalid_files=True)
    counts = {
        "scan": store.count(),
        "sql": connect(store).sql("select count(*) n from trajectories").to_pylist()[0]["n"],
        "files": sum(pq.read_metadata(name).num_rows for name in files),
        "folder": whole_folder.count_rows(),
    }
    assert set(counts.values()) == {3}


@pytest.mark.parametrize("value", ["../../escA", "../escB", "/abs", "a/b", "..", "", None])
def test_X05_no_value_becomes_a_path(tmp_path: Path, value: str | None) -> None:
    store = TrajectoryStore.create(tmp_path / "deep" / "s")
    given = Trajectory(id=value or "", group_id=value, source=value, metadata={"run_name": value}, tokens=[1])
    store.append([given], writer_id=value or "w", batch_no=0)
    if value:
        store.tag(value)
        store.record_training_step(1, [value])
    store.maintenance.update([store.scan().to_trajectories()[0].id], {"group_id": [value]})
    (back,) = store.scan().to_trajectories()
    assert (back.group_id, back.source, back.metadata) == (value, value, {"run_name": value})
    assert back.id == value if value else back.id
    counted = connect(store).sql("select count(*) n from trajectories where source is null").to_pylist()
    assert counted == [{"n": 1 if value is None else 0}], "'' and null are not the same"
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["s"]
    folders = {p.name for p in store.path.rglob("*") if p.is_dir()}
    assert folders <= {"_delta_log", "_trajstore", "ledger", "tags"}, "no folder has a name made of data"
    assert not any(Path(name).exists() for name in ("/abs", "/escA", "/escB"))
    assert store.maintenance.fsck() == []


def test_D05_files_that_are_read_are_never_rewritten(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(rows(0, 5))
    store.append(rows(5, 5))
    (path, *_) = (Path(name) for name in store.scan().data_files())
    before, inode = path.read_bytes(), path.stat().st_ino
    mapped = pq.read_table(path, memory_map=True)
    values = mapped["tokens"].to_pylist()
    store.maintenance.compact()
    store.maintenance.update(["r1"], {"reward": [5.0]})
    assert (path.read_bytes(), path.stat().st_ino) == (before, inode)
    store.maintenance.vacuum(0, force=True)
    assert not path.exists()
    assert mapped["tokens"].to_pylist() == values


def test_D06_many_files_cost_few_descriptors(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    for k in range(150):
        store.append(rows(k, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, hard))
    try:
        for _ in range(2):
            loader = TrajectoryLoader(store.scan(), batch_size=16)
            assert sum(len(batch["ids"]) for batch in loader) == 150
            assert store.column_bytes()
            assert len(list(Path("/proc/self/fd").iterdir())) < used + 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
