"""What a scan says of its gates, and what it reads to choose."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trajstore import PolicyVersion, QueryError, Trajectory, TrajectoryStatus, TrajectoryStore
from trajstore.query import fresh, stratified_sample
from trajstore.store.place import Place
from trajstore.store.scalars import ScalarCache


def row(id: str, length: int, version: int, **fields: Any) -> Trajectory:
    return Trajectory(
        id=id,
        prompt_tokens=[1],
        response_tokens=[2] * (length - 1),
        behavior_log_probs=[-1.0] * length,
        version=PolicyVersion(version),
        status=TrajectoryStatus.COMPLETED,
        **fields,
    )


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    store = TrajectoryStore.create(tmp_path / "store")
    store.append([row(f"e{i}", 5, 10, source="easy", metadata={"task": "a"}) for i in range(6)])
    store.append([row(f"h{i}", 80, 6, source="hard", metadata={"task": "b"}) for i in range(4)])
    store.append([row("n", 5, 10)])
    return store


def test_each_gate_by_task_and_by_length(store: TrajectoryStore) -> None:
    scan = store.scan(where=fresh(at=10, max_staleness=3)).filter("id <> 'e0'").limit(4)
    explained = scan.explain()
    first, second, _ = explained
    assert [(gate.rows_in, gate.rows_out, gate.dropped) for gate in explained] == [
        (11, 7, 4),
        (7, 6, 1),
        (6, 4, 2),
    ]
    assert [(s.value, s.rows_in, s.rows_out) for s in first.by_task] == [
        (None, 1, 1), ("easy", 6, 6), ("hard", 4, 0)
    ]  # fmt: skip
    assert [(s.value, s.rows_in, s.dropped, s.tokens_in) for s in first.by_length] == [
        ((4, 7), 7, 0, 35), ((64, 127), 4, 4, 320)
    ]  # fmt: skip
    assert (first.mean_length_kept, first.mean_length_dropped) == (5.0, 80.0)
    assert [(s.value, s.rows_in, s.rows_out) for s in second.by_task] == [(None, 1, 1), ("easy", 6, 5)]
    assert explained.warnings == [
        "fresh(at=10, max_staleness=3, gap_of='oldest') dropped all 4 rows of source 'hard'",
        "fresh(at=10, max_staleness=3, gap_of='oldest') dropped all 4 rows of 64 to 127 tokens",
        "limit 4 dropped all 1 rows of source None",
    ]
    assert [(g.label, g.rows_in, g.rows_out) for g in scan.gates()] == [
        (g.label, g.rows_in, g.rows_out) for g in explained
    ]
    assert "source hard: 0 of 4 kept" in str(explained)
    frame = explained.to_polars()
    assert frame.filter(part="all")["rows_out"].to_list() == [7, 6, 4]
    assert frame.filter(part="task", value="hard")["rows_out"].to_list() == [0]


def test_what_a_task_is_can_be_chosen(store: TrajectoryStore) -> None:
    scan = store.scan(where=fresh(at=10, max_staleness=3))
    by_metadata = scan.explain(by="metadata.task")[0].by_task
    assert [(s.value, s.dropped) for s in by_metadata] == [(None, 0), ("a", 0), ("b", 4)]
    assert scan.explain(by=None)[0].by_task == ()
    assert [s.value for s in scan.explain(by="length")[0].by_task] == [5, 80]
    with pytest.raises(QueryError, match="there is no column 'nope'"):
        scan.explain(by="nope")


def test_an_empty_result_and_a_scan_without_steps(store: TrajectoryStore, tmp_path: Path) -> None:
    nothing = store.scan("length > 100").explain()
    assert nothing[0].rows_out == 0
    assert len(nothing.warnings) == 5  # three tasks, two lengths
    assert len(store.scan().explain()) == 0
    empty = TrajectoryStore.create(tmp_path / "empty")
    (gate,) = empty.scan("length > 1").explain()
    assert (gate.rows_in, gate.rows_out, gate.by_task, gate.by_length) == (0, 0, (), ())


# What is read


class Reads:
    """Bytes read from each file of a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        self.opened: list[str] = []
        real = Place.open
        import pyarrow as pa

        counting = self

        class Counting:
            closed = False

            def __init__(self, source: Any) -> None:
                self._source = source

            def read(self, size: int = -1) -> bytes:
                data: bytes = self._source.read(size)
                counting.bytes += len(data)
                return data

            def seek(self, *where: int) -> int:
                return int(self._source.seek(*where))

            def tell(self) -> int:
                return int(self._source.tell())

            def close(self) -> None:
                self._source.close()

        def opened(place: Place, name: str) -> Any:
            self.opened.append(name)
            return pa.PythonFile(Counting(real(place, name)), mode="r")

        monkeypatch.setattr(Place, "open", opened)


def test_choosing_rows_reads_scalars_once_and_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    rng_rows = [row(f"r{i}", 2000 + i % 7, i % 10) for i in range(300)]
    for i, each in enumerate(rng_rows):
        each.response_tokens = [(i * 7919 + t * 104729) % 50000 for t in range(len(each.response_tokens))]
    store.append(rng_rows[:150])
    store.append(rng_rows[150:])
    sizes = store.column_bytes()
    lists = sum(sizes[name] for name in ("tokens", "behavior_log_probs"))
    whole = sum(Path(path).stat().st_size for path in store.scan().data_files())
    footers = 2 * (64 << 10)
    assert lists > 2 * (whole - lists + footers)  # otherwise the bound below says nothing
    reads = Reads(monkeypatch)
    scan = store.scan(where=fresh(at=9, max_staleness=4))
    sample = stratified_sample(scan, 20, at=9)
    assert sample.count() == 20
    assert 0 < reads.bytes < whole - lists + footers
    first = reads.bytes
    other = store.scan(where=fresh(at=8, max_staleness=4))
    assert stratified_sample(other, 20, at=9, seed=1).count() == 20
    assert store.at(store.snapshot).scan(where=fresh(at=9, max_staleness=2)).count() > 0
    assert reads.bytes == first  # a warm handle reads nothing, not even for another snapshot
    store.append([row("new", 5, 9)])
    reads.opened.clear()
    assert store.scan(where=fresh(at=9, max_staleness=0)).count() == 31
    assert len(set(reads.opened)) == 1  # the new file only
    reads.bytes = 0
    assert len(sample.to_batch()) == 20
    assert reads.bytes > 0


def test_the_cache_is_bounded_and_answers_alike(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ScalarCache(max_bytes=600)
    monkeypatch.setattr(store, "_scalars", small)
    for _ in range(2):
        for where, n in (("length > 10", 4), ("source = 'easy'", 6), ("reward >= 0", 11), ("id = 'n'", 1)):
            assert store.scan(where=where).count() == n
            assert small.bytes <= 600


def test_scans_of_one_handle_in_many_threads(store: TrajectoryStore) -> None:
    found: list[int] = []

    def ask() -> None:
        for _ in range(5):
            scan = store.scan(where=fresh(at=10, max_staleness=3)).filter("length > 1")
            found.append(scan.count())

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [7] * 30


def test_scalar_columns_come_in_order_and_type(store: TrajectoryStore) -> None:
    names = ["id", "length", "reward", "terminated", "ingested_at", "ingest_snapshot", "source"]
    scan = store.scan("length < 10")
    scalars, both = scan.columns(names).to_arrow(), scan.to_arrow().select(names)
    assert scalars.schema == both.schema
    assert scalars.to_pylist() == both.to_pylist()
    assert store.scan("ingest_snapshot = 2").columns(["id"]).to_arrow()["id"].to_pylist() == [
        f"h{i}" for i in range(4)
    ]


def test_a_gate_that_keeps_nothing_has_no_mean_length(store: TrajectoryStore) -> None:
    text = str(store.scan("length < 0").explain("source"))
    assert "mean length: dropped " in text
    assert "nan" not in text
    assert str(store.scan().explain("source")) == "no gate: every row stays"


def test_rows_of_unknown_version_are_counted_by_the_gate_that_drops_them(store: TrajectoryStore) -> None:
    spans = {"version_span": (6, 10), "version": None}
    store.append([replace(row(f"u{i}", 5, 0), version=None) for i in range(3)])
    store.append([replace(row("span", 5, 0), **spans)])
    scan = store.scan(where="id <> 'u0'").filter(fresh(at=10, max_staleness=3))
    first, second = explained = scan.explain()
    assert (first.dropped, first.unknown_version) == (1, 0)
    assert (second.dropped, second.unknown_version) == (4 + 2 + 1, 2), "stale, unknown, the span from 6 on"
    part = explained.to_polars().filter(part="version")
    assert part.select("step", "value", "rows_in", "rows_out").rows() == [(1, "unknown", 2, 0)]
    by_mean = store.scan(where=fresh(at=10, max_staleness=3, gap_of="mean")).explain()
    assert by_mean[0].unknown_version == 4, "where in the span the tokens are is not known"
    assert str(by_mean).count("unknown version: 0 of 4 kept") == 1
