"""Samples over stores: whole groups, weights, uses, and independence of layout and compaction."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from trajstore import PolicyVersion, QueryError, Trajectory, TrajectoryStatus, TrajectoryStore
from trajstore.query import fresh, max_times_sampled, stratified_sample


def rollout(i: int) -> Trajectory:
    group = i // 4
    return Trajectory(
        id=f"r{i:03}",
        group_id=f"g{group:02}",
        group_size=4,
        prompt_tokens=[1, 2],
        response_tokens=list(range(1 + i % 5)),
        reward=float(i % 3),
        version=None if group == 7 else PolicyVersion(i % 10),
        status=TrajectoryStatus.ABORTED if i == 5 else TrajectoryStatus.COMPLETED,
        source=["math", "code"][group % 2],
    )


ROWS = [rollout(i) for i in range(80)]


def store_of(path: Path, *appends: Sequence[Trajectory]) -> TrajectoryStore:
    store = TrajectoryStore.create(path)
    for rows in appends:
        store.append(rows)
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    return store_of(tmp_path_factory.mktemp("sampling") / "store", ROWS[:30], ROWS[30:31], ROWS[31:])


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    """The same rows in another order and other files, compacted in part."""
    order = np.random.default_rng(1).permutation(80)
    parts = [[ROWS[i] for i in part] for part in np.array_split(order, 6)]
    store = store_of(tmp_path_factory.mktemp("sampling") / "moved", *parts[:4])
    store.maintenance.compact()
    for part in parts[4:]:
        store.append(part)
    return store


def drawn(store: TrajectoryStore, n: int, **options: Any) -> list[str]:
    sample = stratified_sample(store.scan(), n, **{"at": 9} | options)
    return sorted(sample.to_polars()["id"])


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "freshness"},
        {"weights": "freshness", "by": None, "seed": 4},
        {"weights": "length", "by": "source"},
        {"weights": pl.col("reward") + 1, "allocation": "proportional"},
        {"by": "source", "allocation": {"math": 3, "code": 1}},
        {"gap_of": "mean"},
        {"n": 5, "whole_groups": True, "by": None},
        {"n": 5, "whole_groups": True, "by": "source", "weights": "freshness"},
        {"n": 500, "whole_groups": True},
    ],
)
def test_a_sample_depends_on_rows_and_seed_alone(
    store: TrajectoryStore, moved: TrajectoryStore, options: dict[str, Any]
) -> None:
    n = options.get("n", 14)
    rest = {k: v for k, v in options.items() if k != "n"}
    found = drawn(store, n, **rest)
    assert found == drawn(moved, n, **rest) == drawn(store, n, **rest)
    if not options.get("whole_groups"):
        assert len(found) == len(set(found)) == 14


def test_compaction_changes_no_sample(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", *(ROWS[i : i + 4] for i in range(0, 24, 4)))
    options = [{}, {"weights": "freshness"}, {"whole_groups": True, "by": None}]
    before = [drawn(store, 3, **how) for how in options]
    store.maintenance.compact()
    assert len(store.scan().data_files()) == 1
    assert [drawn(store, 3, **how) for how in options] == before


def test_whole_groups_of_a_store(store: TrajectoryStore) -> None:
    sample = stratified_sample(store.scan(), 6, by=None, whole_groups=True)
    groups = Counter(row.group_id for row in sample.to_batch())
    assert len(groups) == 6
    assert set(groups.values()) == {4}
    everything = stratified_sample(store.scan(), 99, by=None, whole_groups=True).to_batch()
    assert {row.group_id for row in everything} == {f"g{i:02}" for i in range(20)} - {"g01"}  # one aborted
    gate = fresh(at=9, max_staleness=7)
    gated = stratified_sample(store.scan(where=gate), 99, by=None, whole_groups=True)
    kept = {row.group_id for row in gated.to_batch()}
    worst = {}
    for row in ROWS:
        worst.setdefault(row.group_id, []).append(99 if row.version is None else 9 - row.version.version_id)
    assert kept == {name for name, gaps in worst.items() if max(gaps) <= 7} - {"g01"}


def test_a_bad_allocation_is_refused_when_it_is_made(store: TrajectoryStore) -> None:
    for allocation in ({"a": -1}, {"a": float("nan")}, {"a": float("inf")}):
        with pytest.raises(QueryError, match=r"allocation of 'a' is .*, expected a number, 0 or more"):
            stratified_sample(store.scan(), 3, by="source", allocation=allocation)
    for options, message in {
        "gap_of": "gap_of is 'x', expected one of oldest",
        "weights": "there is no column 'x'",
        "by": "there is no column 'x'",
    }.items():
        with pytest.raises(QueryError, match=message):
            stratified_sample(store.scan(), 3, at=3, **{options: "x"})
    with pytest.raises(QueryError, match="column 'tokens' is a list"):
        stratified_sample(store.scan(), 3, at=3, weights="tokens")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2.5}, "n is 2.5, expected a whole number"),
        ({"n": -1}, "n is -1, expected 0 or more"),
        ({"n": 2, "seed": "x"}, "seed is 'x', expected a whole number"),
    ],
)
def test_numbers_of_rows_and_seeds_are_whole(
    store: TrajectoryStore, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(QueryError, match=message):
        stratified_sample(store.scan(), by=None, **options)


def test_a_value_inside_metadata_can_be_a_stratum(tmp_path: Path) -> None:
    rows = [
        Trajectory(
            id=f"m{i}", prompt_tokens=[1], response_tokens=[2], metadata={"env": {"name": "ab"[i % 2]}}
        )
        for i in range(10)
    ]
    rows.append(Trajectory(id="none", prompt_tokens=[1], response_tokens=[2], metadata=None))
    store = store_of(tmp_path / "store", rows)
    assert "none" in drawn(store, 3, by="metadata.env.name")
    with pytest.raises(QueryError, match=r"no row has metadata\.env\.nmae\n.*keys of the metadata: env"):
        drawn(store, 3, by="metadata.env.nmae")


# Uses, by the training ledger


def test_a_row_is_used_at_most_k_times(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", ROWS[:8])
    scan = max_times_sampled(store.scan(), 1)
    assert scan.count() == 8
    assert scan.gates()[0].label == "max_times_sampled(1, ledger_rows=0)"
    store.record_training_step(0, ["r000", "r001", "r002"])
    store.record_training_step(1, ["r001", "r002"])
    store.record_training_step(2, ["r002"])
    assert scan.count() == 8  # fixed when it was made
    left = {k: sorted(max_times_sampled(store.scan(), k).to_polars()["id"]) for k in (1, 2, 3, 4)}
    everyone = [row.id for row in ROWS[:8]]
    assert left == {
        1: everyone[3:],
        2: everyone[:1] + everyone[3:],
        3: everyone[:2] + everyone[3:],
        4: everyone,
    }
    assert max_times_sampled(store.scan(), 1, ledger_rows=3).count() == 5
    assert max_times_sampled(store.scan(), 2, ledger_rows=5).count() == 6
    with pytest.raises(QueryError, match="k is 0, expected 1 or more"):
        max_times_sampled(store.scan(), 0)


def test_uses_are_counted_up_to_the_scans_snapshot(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", ROWS[:4])
    store.record_training_step(0, ["r000"])
    store.append(ROWS[4:8])
    store.record_training_step(1, ["r001", "r004"])
    assert sorted(max_times_sampled(store.scan(), 1).to_polars()["id"]) == [
        "r002",
        "r003",
        "r005",
        "r006",
        "r007",
    ]
    assert sorted(max_times_sampled(store.at(1).scan(), 1).to_polars()["id"]) == ["r001", "r002", "r003"]


def test_every_row_is_used_once_before_the_pool_is_empty(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", ROWS[:10])
    seen: list[str] = []
    for step in range(4):
        batch = stratified_sample(max_times_sampled(store.scan(), 1), 3, by=None, seed=step)
        ids = batch.to_polars()["id"].to_list()
        store.record_training_step(step, ids)
        seen += ids
    assert sorted(seen) == [row.id for row in ROWS[:10]]
