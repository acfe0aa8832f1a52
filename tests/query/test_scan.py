"""What a scan keeps and what it reads, over real stores."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from trajstore import (
    CorruptFileError,
    PolicyVersion,
    QueryError,
    SchemaError,
    Trajectory,
    TrajectoryStatus,
    TrajectoryStore,
    VersionSegment,
)
from trajstore.codec import normalize
from trajstore.query import fresh, stratified_sample


def rollout(i: int) -> Trajectory:
    """Versions 0 … 9; every sixth spans two versions, every seventh has none."""
    length = 3 + i % 5
    version = None if i % 7 == 6 else PolicyVersion(i % 10)
    segments = []
    if version is not None and i % 6 == 5:
        newer = PolicyVersion(version.version_id + 3)
        segments = [VersionSegment(2, 3, version), VersionSegment(3, 2 + length, newer)]
    return Trajectory(
        id=f"r{i:02}",
        prompt_tokens=[1, 2],
        response_tokens=list(range(length)),
        reward=math.nan if i == 8 else float(i),
        version=version,
        version_segments=segments,
        status=TrajectoryStatus.COMPLETED if i % 2 else TrajectoryStatus.PENDING,
        group_id=f"g{i // 4}" if i < 30 else None,
    )


ROWS = [rollout(i) for i in range(40)]
IDS = [row.id for row in ROWS]


def store_of(path: Path, *appends: Sequence[Trajectory]) -> TrajectoryStore:
    store = TrajectoryStore.create(path)
    for rows in appends:
        store.append(rows)
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    return store_of(tmp_path_factory.mktemp("scan") / "store", ROWS[:15], ROWS[15:16], ROWS[16:])


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    order = np.random.default_rng(1).permutation(40)
    parts = [[ROWS[i] for i in part] for part in np.array_split(order, 7)]
    return store_of(tmp_path_factory.mktemp("scan") / "moved", *parts)


def versions(row: Trajectory) -> dict[str, int | None]:
    if row.version is None:
        return {"oldest": None, "start": None, "newest": None}
    ids = [s.version.version_id for s in row.version_segments] or [row.version.version_id]
    return {"oldest": min(ids), "start": row.version.version_id, "newest": max(ids)}


@pytest.mark.parametrize("gap_of", ["oldest", "start", "newest"])
@pytest.mark.parametrize(("at", "limit"), [(9, 2), (9, 0), (5, 1), (100, 3), (0, 0), (12, 200)])
def test_fresh_is_the_gap_of_the_chosen_version(
    store: TrajectoryStore, gap_of: Any, at: int, limit: int
) -> None:
    expected = []
    for row in ROWS:
        version = versions(row)[gap_of]
        if version is not None and at - version <= limit:
            expected.append(row.id)
    scan = store.scan(where=fresh(at=at, max_staleness=limit, gap_of=gap_of))
    assert scan.to_polars()["id"].to_list() == expected
    (gate,) = scan.gates()
    assert (gate.rows_in, gate.rows_out, gate.dropped) == (40, len(expected), 40 - len(expected))


def test_every_terminal_verb_gives_the_same_rows(store: TrajectoryStore) -> None:
    scan = store.scan(where="reward > 10 and status = 'completed'")
    expected = [row for row in ROWS if row.is_complete and (row.reward > 10 or math.isnan(row.reward))]
    ids = [row.id for row in expected]
    assert scan.count() == len(ids) == 15
    assert scan.to_trajectories() == [normalize(row) for row in expected]
    assert scan.to_arrow().column("id").to_pylist() == ids
    assert scan.to_polars()["id"].to_list() == ids
    assert [row.id for row in scan.to_batch()] == ids
    parts = list(scan.iter_batches(4))
    assert [len(part) for part in parts] == [4, 4, 4, 3]
    assert [row.id for part in parts for row in part] == ids
    assert list(scan.rows().ids) == ids


@pytest.mark.parametrize(
    "where",
    [
        "length >= 8",
        pl.col("length") >= 8,
        (pl.col("group_id") == "g3") | pl.col("reward").is_nan(),
        "group_id is null",
        "not (version_id < 5)",
    ],
    ids=str,
)
def test_a_predicate_on_any_store_is_polars_on_its_rows(
    store: TrajectoryStore, moved: TrajectoryStore, where: Any
) -> None:
    frame = store.scan().to_polars()
    expression = pl.sql_expr(where) if isinstance(where, str) else where
    expected = frame.filter(expression)["id"].to_list()
    assert 0 < len(expected) < 40
    assert store.scan(where=where).to_polars()["id"].to_list() == expected
    assert sorted(moved.scan(where=where).to_polars()["id"]) == expected


def test_steps_chain_in_order_and_explain_what_they_did(store: TrajectoryStore) -> None:
    scan = store.scan(where=fresh(at=9, max_staleness=6)).filter("status = 'completed'").limit(4)
    scan = scan.filter(pl.col("length") > 5)
    gap = [row for row in ROWS if row.version is not None and row.version.version_id >= 3]
    done = [row for row in gap if row.is_complete]
    kept = [row.id for row in done[:4] if row.total_length > 5]
    gates = scan.gates()
    assert [(gate.rows_in, gate.rows_out) for gate in gates] == [
        (40, len(gap)), (len(gap), len(done)), (len(done), 4), (4, len(kept))
    ]  # fmt: skip
    assert [gate.label for gate in gates][:3] == [
        "fresh(at=9, max_staleness=6, gap_of='oldest')", "status = 'completed'", "limit 4"
    ]  # fmt: skip
    assert scan.to_polars()["id"].to_list() == kept
    assert store.scan().limit(3).filter("reward >= 1").to_polars()["id"].to_list() == ["r01", "r02"]
    assert store.scan().filter("reward >= 1").limit(0).count() == 0
    assert store.scan().gates() == []


def test_narrowing_a_scan_leaves_the_first_as_it_was(store: TrajectoryStore) -> None:
    whole = store.scan()
    whole.filter("reward < 3").limit(1)
    assert whole.count() == 40
    assert whole.is_whole


def test_columns_are_those_that_were_asked_for(store: TrajectoryStore) -> None:
    scan = store.scan(where="reward > 30", columns=["length", "id"])
    assert scan.to_arrow().schema.names == scan.to_polars().columns == ["length", "id"]
    assert store.scan("reward > 30").columns(["id"]).to_polars()["id"].to_list() == ["r08", *IDS[31:]]
    with pytest.raises(QueryError, match="there is no column 'nope'"):
        store.scan(columns=["id", "nope"])
    with pytest.raises(SchemaError, match="a batch needs the column 'id_hash'"):
        scan.to_batch()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("reward >", "cannot read the predicate"),
        ("nope = 1", "there is no column 'nope'"),
        ("tokens = 1", "column 'tokens' is a list"),
        (pl.all() > 1, "stands for several columns"),
        (5, "where is 5, expected a polars expression"),
    ],
    ids=str,
)
def test_a_bad_predicate_is_refused_when_the_scan_is_made(
    store: TrajectoryStore, where: Any, message: str
) -> None:
    with pytest.raises(QueryError, match=message):
        store.scan(where=where)


def test_a_predicate_of_another_type_is_refused_when_it_runs(store: TrajectoryStore) -> None:
    for where, message in {"reward": "gives Float64", "id > 3": "cannot evaluate"}.items():
        with pytest.raises(QueryError, match=message):
            store.scan(where=where).count()


def test_an_empty_store(tmp_path: Path) -> None:
    empty = TrajectoryStore.create(tmp_path / "empty")
    for where in (None, "reward > 1", "true", fresh(at=3, max_staleness=1)):
        scan = empty.scan(where=where)
        assert scan.count() == 0
        assert scan.to_trajectories() == []
        assert scan.to_arrow().schema.names == empty.schema.names
    assert stratified_sample(empty.scan(), 5, at=3).count() == 0


# Samples


def sample_ids(store: TrajectoryStore, n: int = 12, **options: Any) -> list[str]:
    return sorted(stratified_sample(store.scan(), n, **{"at": 9} | options).to_polars()["id"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 5},
        {"allocation": "proportional"},
        {"by": "group_id"},
        {"by": "reward"},
        {"by": pl.col("length") // 3},
        {"n": 0},
        {"n": 3},
        {"n": 400},
    ],
)
def test_a_sample_does_not_depend_on_files_and_their_order(
    store: TrajectoryStore, moved: TrajectoryStore, options: dict[str, Any]
) -> None:
    drawn = sample_ids(store, **options)
    assert drawn == sample_ids(moved, **options) == sample_ids(store, **options)
    assert len(set(drawn)) == min(options.get("n", 12), 40)


def test_a_sample_takes_an_equal_share_of_every_gap(store: TrajectoryStore) -> None:
    sample = stratified_sample(store.scan(), 22, at=PolicyVersion(9))
    found = Counter(sample.to_polars()["oldest_version_id"].to_list())
    assert len(found) == 11  # ten versions and the unknown
    assert set(found.values()) == {2}
    assert sample.gates()[0].label == "stratified_sample(22, by=version_gap, seed=0)"
    assert (sample.gates()[0].rows_in, sample.count()) == (40, 22)
    order = [IDS.index(id) for id in sample.to_polars()["id"]]
    assert order == sorted(order)  # in order of arrival


def test_a_sample_of_a_narrowed_scan_and_a_narrowed_sample(store: TrajectoryStore) -> None:
    completed = store.scan(where="status = 'completed'")
    sample = stratified_sample(completed, 6, by="length", seed=2)
    assert set(sample.to_polars()["status"]) == {"completed"}
    assert sample.filter("length > 7").count() == sum(sample.to_polars()["length"] > 7)
    assert stratified_sample(sample, 3, by="length").count() == 3
    assert stratified_sample(store.scan("reward < -1"), 3, at=9).count() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": -1}, "n is -1"),
        ({"allocation": "fair"}, "allocation is 'fair', expected 'equal' or 'proportional'"),
        ({"by": 5}, "by is 5, expected a column's name or a polars expression"),
        ({"by": "nope"}, "there is no column 'nope'"),
        ({"by": "tokens"}, "column 'tokens' is a list"),
        ({"by": pl.all()}, "stands for several columns"),
        ({"at": None}, "a version gap needs the current policy version"),
    ],
)
def test_a_bad_request_is_refused_when_it_is_made(
    store: TrajectoryStore, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(QueryError, match=message):
        stratified_sample(store.scan(), **{"n": 3, "at": 9} | options)


# What is read


def test_choosing_reads_no_list_column(tmp_path: Path) -> None:
    """With the bytes of every list column destroyed, whatever decides by scalars still works."""
    store = store_of(tmp_path / "store", ROWS)
    (path,) = map(Path, store.scan().data_files())
    group = pq.read_metadata(path).row_group(0)
    damaged = bytearray(path.read_bytes())
    for chunk in (group.column(i) for i in range(group.num_columns)):
        if ".list." in chunk.path_in_schema:
            start = chunk.data_page_offset
            if chunk.has_dictionary_page:
                start = min(start, chunk.dictionary_page_offset)
            damaged[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(damaged)
    store = TrajectoryStore.open(store.path)
    assert store.count() == 40
    assert store.scan(where="reward > 30 and length > 4").count() > 0
    assert store.scan(where=fresh(at=9, max_staleness=3)).limit(5).count() == 5
    assert stratified_sample(store.scan(), 12, at=9).count() == 12
    assert store.scan(columns=["id", "reward", "length"]).to_polars()["id"].to_list() == IDS
    with pytest.raises(CorruptFileError, match=path.name):
        store.scan().to_arrow()


def test_a_gate_does_not_open_files_that_cannot_hold_a_row(tmp_path: Path) -> None:
    old = [row for row in ROWS if versions(row)["newest"] is not None and row.version_segments == []][:10]
    unknown = [row for row in ROWS if row.version is None]
    new = [Trajectory(id="new", prompt_tokens=[1], response_tokens=[2], version=PolicyVersion(90))]
    store = store_of(tmp_path / "store", old, unknown, new)
    scan = store.scan(where=fresh(at=92, max_staleness=2))
    for path in scan.data_files()[:2]:
        Path(path).unlink()
    assert scan.to_polars()["id"].to_list() == ["new"]
    assert [(gate.rows_in, gate.rows_out) for gate in scan.gates()] == [(10 + len(unknown) + 1, 1)]


def test_a_scan_stays_at_its_snapshot(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", ROWS[:3])
    scan = store.scan()
    sample = stratified_sample(scan, 10, at=9)
    store.append(ROWS[3:6])
    assert (scan.count(), sample.count(), store.scan().count(), store.at(1).scan().count()) == (3, 3, 6, 3)
