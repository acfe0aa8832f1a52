"""Decoded columns: equal to what is stored, shared, atomic, bounded, and safe to remove under a reader."""

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trajstore import CorruptFileError, InputError, StorageError, Trajectory, TrajectoryBatch, TrajectoryStore
from trajstore.loader import TrajectoryLoader
from trajstore.schema import Column, list_of
from trajstore.store import columns
from trajstore.store.cache import CacheUse, ColumnCache, default_folder, key, parse_size
from trajstore.store.place import Place
from trajstore.store.table import Table

NAMES = ("id", "length", "tokens", "log_probs", "loss_mask")


def rows(count: int, first: int = 0) -> list[Trajectory]:
    made = []
    for i in range(first, first + count):
        length = i * 7 % 23
        made.append(
            Trajectory(
                id=f"row {i}",
                tokens=np.arange(length) + i,
                prompt_length=0,
                response_length=length,
                log_probs=np.full(length, -i / 8) if i % 3 else [],
                reward=float(i),
            )
        )
    return made


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    store = TrajectoryStore.create(tmp_path / "a store")
    store.append(rows(30))
    store.append(rows(5, 30))
    return store


@pytest.fixture
def cache(tmp_path: Path) -> ColumnCache:
    return ColumnCache(tmp_path / "cache")


def opened(cache: ColumnCache, store: TrajectoryStore, names: Any = NAMES) -> tuple[pa.Table, CacheUse]:
    table = Table.open(Place.of(store.path))
    return cache.open(table.place, table.files(), pa.schema([table.schema.field(n) for n in names]))


def by_id(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: row["id"])


def stored(store: TrajectoryStore, names: Any = NAMES) -> list[dict[str, Any]]:
    return by_id(store.scan(columns=names).to_arrow())


def kept(cache: ColumnCache) -> set[str]:
    return {str(path.relative_to(cache.folder)) for path in cache.folder.rglob("*") if path.is_file()}


def test_columns_are_those_of_the_files(store: TrajectoryStore, cache: ColumnCache) -> None:
    for use in (CacheUse(0, 10), CacheUse(10, 0)):
        table, found = opened(cache, store)
        assert found == use
        assert table.schema.field("tokens").type == pa.large_list(pa.field("element", pa.int32(), False))
        assert by_id(table) == stored(store)
    table.validate(full=True)
    assert {type(x) for x in table["log_probs"].to_pylist()} == {list, type(None)}


def test_an_append_costs_only_its_own_files(store: TrajectoryStore, cache: ColumnCache) -> None:
    opened(cache, store)
    store.append(rows(2, 35))
    table, use = opened(cache, store)
    assert use == CacheUse(hits=10, decoded=5)
    assert by_id(table) == stored(store)
    assert opened(cache, store, (*NAMES, "advantages"))[1] == CacheUse(hits=15, decoded=3)


def test_row_groups_are_decoded_in_steps(
    tmp_path: Path, cache: ColumnCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "STEP", 1)
    store = TrajectoryStore.create(tmp_path / "store")
    store.append(rows(2500))
    table, _ = opened(cache, store)
    assert table["tokens"].num_chunks == 3
    assert by_id(table) == stored(store)


def test_a_users_columns(tmp_path: Path, cache: ColumnCache) -> None:
    flags, weights, notes = "flag.of/../it", "weights of it", "notes"
    kinds = {flags: list_of(pa.bool_()), weights: list_of(pa.float32()), notes: pa.string()}
    store = TrajectoryStore.create(tmp_path / "store")
    store.append(rows(1))
    for name, kind in kinds.items():
        store.maintenance.add_column(Column(name, kind, "scalar" if name == notes else "list"))
    values = {
        flags: [[True, False], None, []],
        weights: [[0.5], [], None],
        notes: ["a", None, ""],
    }
    table = TrajectoryBatch(rows(3)).to_arrow()
    for name, kind in kinds.items():
        table = table.append_column(pa.field(name, kind), pa.array(values[name], kind))
    store.append(table)
    found, _ = opened(cache, store, ["id", *kinds])
    assert found.schema.field(flags).type.value_type == pa.uint8()
    assert found[flags].to_pylist() in ([None, *values[flags]], [*values[flags], None])
    assert by_id(found.set_column(1, flags, found[flags].cast(kinds[flags]))) == stored(store, ["id", *kinds])
    assert all(path.count("/") == 1 for path in kept(cache)), "a name of a column is no path"


def test_an_attention_mask_of_ones_is_not_kept(tmp_path: Path, cache: ColumnCache) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    for name, mask in (("ones", [1, 1, 1]), ("holes", [1, 0, 1])):
        store.append([Trajectory(id=name, prompt_tokens=[1], response_tokens=[2, 3], attention_mask=mask)])
    table, _ = opened(cache, store, ["id", "attention_mask"])
    assert by_id(table) == [
        {"id": "holes", "attention_mask": [1, 0, 1]},
        {"id": "ones", "attention_mask": None},
    ]
    (batch,) = TrajectoryLoader(store.scan(), batch_size=2)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 1]]


def test_what_is_mapped_cannot_be_written_to(store: TrajectoryStore, cache: ColumnCache) -> None:
    table, _ = opened(cache, store)
    values = table["tokens"].chunk(0).values.to_numpy(zero_copy_only=True)
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1


def test_a_reader_keeps_what_is_removed_under_it(store: TrajectoryStore, cache: ColumnCache) -> None:
    table, _ = opened(cache, store)
    before = stored(store)
    size = sum(entry.bytes for entry in cache.entries())
    assert cache.remove() == size > 0
    assert list(cache.folder.iterdir()) == []
    assert by_id(table) == before
    assert opened(cache, store)[1] == CacheUse(0, 10)


def test_least_recently_used_goes_first(store: TrajectoryStore, cache: ColumnCache, tmp_path: Path) -> None:
    opened(cache, store, ["tokens", "log_probs"])
    for age, entry in enumerate(cache.entries()):
        os.utime(entry.path, (age, age))
    opened(cache, store, ["tokens"])  # its two files are now the newest
    other = TrajectoryStore.create(tmp_path / "other")
    other.append(rows(30))
    size = {e.path: e.bytes for e in cache.entries()}
    oldest, second = (e for e in cache.entries() if e.column == "log_probs")
    held = sum(size.values())
    tight = ColumnCache(tmp_path / "cache", limit=held)
    opened(tight, other, ["length"])
    assert oldest.path not in {e.path for e in cache.entries()}
    assert {e.column for e in cache.entries()} >= {"tokens", "length"}
    assert sum(e.bytes for e in cache.entries()) <= held
    with pytest.raises(StorageError, match=r"need [\d,]+ bytes in the cache.*limit is 5.*\n.*CACHE_SIZE"):
        opened(ColumnCache(tmp_path / "cache", limit=5), other, ["tokens"])
    assert second.column == "log_probs"


def test_what_a_killed_builder_left_is_taken_over(store: TrajectoryStore, cache: ColumnCache) -> None:
    table = Table.open(Place.of(store.path))
    name = key(table.place, table.files()[0].name, table.files()[0].bytes)
    aside = cache.folder / name / "tokens.tmp"
    script = (
        "import sys, time; from pathlib import Path; from trajstore.store.cache import _locked\n"
        "with _locked(Path(sys.argv[1])) as aside:\n"
        "    aside.write_bytes(b'ARROW1' * 99); print('holding', flush=True); time.sleep(600)"
    )
    builder = subprocess.Popen([sys.executable, "-c", script, str(aside)], stdout=subprocess.PIPE)
    assert builder.stdout is not None
    try:
        assert builder.stdout.readline() == b"holding\n"
        assert opened(cache, store, ["id"])[1] == CacheUse(0, 2)
        assert cache.remove() > 0
        assert aside.exists(), "it is still being written"
    finally:
        builder.send_signal(signal.SIGKILL)
        builder.wait()
        builder.stdout.close()
    assert [e.column for e in cache.entries()] == [""]
    found, use = opened(cache, store)
    assert (by_id(found), use) == (stored(store), CacheUse(0, 10))
    assert not [path for path in kept(cache) if not path.endswith(".arrow")]


def test_builders_at_once_decode_every_column_once(
    store: TrajectoryStore, cache: ColumnCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[tuple[str, str]] = []

    def counted(place: Any, file: Any, field: pa.Field, *rest: Any) -> None:
        decoded.append((file.name, field.name))
        columns.decode(place, file, field, *rest)

    monkeypatch.setattr("trajstore.store.cache.decode", counted)
    barrier, found = threading.Barrier(4), []

    def build() -> None:
        barrier.wait()
        found.append(opened(cache, store)[0])

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [by_id(table) for table in found] == [stored(store)] * 4
    assert len(decoded) == len(set(decoded)) == 10


def test_processes_share_it(store: TrajectoryStore, cache: ColumnCache) -> None:
    script = (
        "import sys; from trajstore import TrajectoryStore\n"
        "rows = TrajectoryStore.open(sys.argv[1]).scan().rows(['tokens', 'log_probs'])\n"
        "print(sum(rows.column('tokens').row(i).sum() for i in range(35)))"
    )
    environment = os.environ | {"TRAJSTORE_CACHE": str(cache.folder.parent)}
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(store.path)], env=environment, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    said = [builder.communicate()[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    total = sum(sum(row["tokens"]) for row in stored(store))
    assert said == [f"{total}\n".encode()] * 2
    assert not [path for path in kept(cache) if not path.endswith(".arrow")]
    assert opened(cache, store, ["tokens", "log_probs"])[1] == CacheUse(4, 0)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, cache: ColumnCache) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    store.append(rows(2000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(StorageError, match=r"the column cache .*refused: .*\n.*TRAJSTORE_CACHE"):
            opened(cache, store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(path.endswith(".arrow") for path in kept(cache))
    assert by_id(opened(cache, store)[0]) == stored(store)


def test_a_folder_that_cannot_be_made_is_said(store: TrajectoryStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"the column cache .*file.* refused"):
        opened(ColumnCache(tmp_path / "file"), store)


def test_a_lost_data_file_is_said(store: TrajectoryStore, cache: ColumnCache) -> None:
    for path in store.path.glob("*.parquet"):
        path.unlink()
    with pytest.raises(CorruptFileError, match="is gone"):
        opened(cache, store)
    assert kept(cache) == set()


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros", "other type", "other rows"])
def test_damage_is_decoded_again(store: TrajectoryStore, cache: ColumnCache, damage: str) -> None:
    opened(cache, store)
    for entry in cache.entries():
        data = entry.path.read_bytes()
        if damage == "other type":
            other = pa.table({entry.column: pa.nulls(30, pa.int8())})
            with pa.ipc.new_file(str(entry.path), other.schema) as writer:
                writer.write_table(other)
            continue
        if damage == "other rows":
            fewer = pa.ipc.open_file(data).read_all()[1:]
            with pa.ipc.new_file(str(entry.path), fewer.schema) as writer:
                writer.write_table(fewer)
            continue
        worse = {"empty": b"", "cut": data[: len(data) // 2], "zeros": bytes(len(data))}[damage]
        entry.path.unlink()
        entry.path.write_bytes(worse)
    table, use = opened(cache, store)
    assert (by_id(table), use) == (stored(store), CacheUse(0, 10))


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAJSTORE_CACHE", str(tmp_path / "x"))
    assert default_folder() == tmp_path / "x"
    monkeypatch.delenv("TRAJSTORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "trajstore"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "trajstore"


def test_how_large_it_may_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse_size("1500000") == 1_500_000
    assert parse_size("1.5K") == 1536
    assert parse_size("2 TiB") == 2 << 40
    assert parse_size("200gb") == 200 << 30
    for wrong in ("", "-1", "many", "1X"):
        with pytest.raises(InputError, match="expected a size"):
            parse_size(wrong)
    monkeypatch.setenv("TRAJSTORE_CACHE_SIZE", "3M")
    assert ColumnCache(tmp_path).limit() == 3 << 20
    monkeypatch.delenv("TRAJSTORE_CACHE_SIZE")
    assert ColumnCache(tmp_path).limit() > 0


def test_names_of_data_files(tmp_path: Path) -> None:
    place = Place.of(tmp_path)
    ours = f"part-{'0' * 32}-{'1' * 16}.parquet"
    assert key(place, ours, 1) == key(Place.of(tmp_path / "copy"), ours, 1) == ours.removesuffix(".parquet")
    others = {key(place, "0.parquet", 1), key(place, "0.parquet", 2), key(place.child("a"), "0.parquet", 1)}
    assert len(others) == 3
    assert all("/" not in name for name in others)
