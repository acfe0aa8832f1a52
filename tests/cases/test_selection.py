"""Themes: staleness, groups and sampling, and text that becomes a query (cases P*, G*, X02)."""

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from trajstore import (
    PolicyVersion,
    QueryError,
    Trajectory,
    TrajectoryStatus,
    TrajectoryStore,
    ValidationError,
    VersionSegment,
)
from trajstore.query import (
    connect,
    fresh,
    informative_groups,
    mask_stale_tokens,
    max_times_sampled,
    stratified_sample,
)

DONE = TrajectoryStatus.COMPLETED


def ids(scan: Any) -> list[str]:
    return scan.columns(["id"]).to_arrow()["id"].to_pylist()  # type: ignore[no-any-return]  # pyarrow


def test_P01_a_row_of_three_versions_is_dropped_whole_or_masked_by_token(case: Any, tmp_path: Path) -> None:
    segments, at = [], 0
    for part in case["segments"]:
        segments.append(VersionSegment(at, at + part["n_tokens"], PolicyVersion(part["version"])))
        at += part["n_tokens"]
    versions = [int(version) for version in case["slime_form"]["weight_versions"]]
    length = case["slime_form"]["response_length"]
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(
        [
            Trajectory(
                id="exact",
                response_tokens=list(range(at)),
                version=PolicyVersion(2),
                version_segments=segments,
                status=DONE,
            ),
            Trajectory(
                id="slime",
                response_tokens=list(range(length)),
                version_span=(min(versions), max(versions)),
                version_known="list",
                status=DONE,
            ),
        ]
    )
    trainer, limit = case["trainer_version"], case["max_staleness"]
    with connect(store, current_version=trainer) as connection:
        tokens = connection.sql(
            "select id, version_id, version_gap from tokens order by id, position"
        ).to_pylist()
        gaps = connection.sql("select id, version_gap from trajectories order by id").to_pylist()
    assert [row["version_id"] for row in tokens[:12]] == [2, 2, 4, 4] + [6] * 8
    assert [row["version_id"] for row in tokens[12:]] == [None] * 12  # not spread over tokens by guess
    assert [row["version_gap"] for row in gaps] == [4, 4]
    assert ids(store.scan(where=fresh(trainer, limit))) == []  # by the oldest token
    assert ids(store.scan(where=fresh(trainer, limit, gap_of="newest"))) == ["exact", "slime"]
    exact, slime = mask_stale_tokens(store.scan(), at=trainer, max_staleness=limit)
    assert list(exact.loss_mask) == [0, 0] + [1] * 10
    assert list(slime.loss_mask) == [0] * 12


def test_P03_a_row_newer_than_the_trainer_has_a_negative_gap(case: Any, tmp_path: Path) -> None:
    versions = pl.Series(case["versions_uint32"], dtype=pl.UInt32)
    trainer, limit = case["trainer_version"], case["max_staleness"]
    expected = [2, 0, -2]
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(
        Trajectory(id=str(v), response_tokens=[1], version=PolicyVersion(v), status=DONE) for v in versions
    )
    with connect(store, current_version=trainer) as connection:
        found = connection.sql("select version_gap from trajectories order by oldest_version_id")
    assert found["version_gap"].to_pylist() == expected
    expression = pl.DataFrame({"v": versions}).select(pl.col("v").traj.version_gap(trainer))  # type: ignore[attr-defined]  # registered
    assert expression.to_series().to_list() == expected
    gate = store.scan(where=fresh(trainer, limit))
    assert ids(gate) == ["5", "7"]  # kept by rule: newer is not stale
    by_gap = stratified_sample(store.scan(), 3, at=trainer, allocation={-2: 1})
    assert ids(by_gap) == ["7"]


def test_P08_the_explanation_names_the_task_that_a_gate_starves(case: Any, tmp_path: Path) -> None:
    assert "50 groups len=8000 gap=4 source='hard'; max_staleness=3" in case["generator"]
    store = TrajectoryStore.create(tmp_path / "s")
    for source, length, gap in (("easy", 500, 0), ("hard", 8000, 4)):
        store.append(
            Trajectory(
                id=f"{source}{i}",
                group_id=f"{source}{i}",
                response_tokens=[1] * length,
                version=PolicyVersion(10 - gap),
                source=source,
                status=DONE,
            )
            for i in range(50)
        )
    explained = store.scan(where=fresh(10, 3)).explain()
    (gate,) = explained
    assert [(s.value, s.rows_out, s.dropped) for s in gate.by_task] == [("easy", 50, 0), ("hard", 0, 50)]
    assert (gate.mean_length_kept, gate.mean_length_dropped) == (500.0, 8000.0)
    assert "dropped all 50 rows of source 'hard'" in explained.warnings[0]
    tolerant = store.scan(where=fresh(10, {"easy": 3, "hard": 4}, by="source")).explain()
    assert tolerant.warnings == []


def test_P10_order_and_staleness_go_by_version_and_arrival_not_by_clocks(case: Any, tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    times = {"x": 1767225690.0, "y": 1767225610.0}  # the second host's clock is behind
    for record in case["records"]:
        name = record["traj_id"]
        version = PolicyVersion(record["policy_version"], timestamp=times[name])
        row = Trajectory(id=name, response_tokens=[1], version=version, status=DONE)
        store.append([row])
    assert ids(store.scan()) == ids(store.scan().limit(2)) == ["x", "y"]
    assert ids(store.scan().limit(1)) == ["x"]
    assert ids(store.scan(where=fresh(6, 0))) == ["y"]
    store.record_training_step(0, ["x"])
    assert ids(max_times_sampled(store.scan(), 1).limit(1)) == ["y"]
    store.maintenance.compact()
    assert ids(store.scan()) == ["x", "y"]


def grouped(path: Path, groups: dict[str, list[float]]) -> TrajectoryStore:
    store = TrajectoryStore.create(path / "s")
    store.append(
        Trajectory(
            id=f"{name}{i}",
            group_id=name,
            group_size=len(rewards),
            response_tokens=[1],
            reward=x,
            status=DONE,
        )
        for name, rewards in groups.items()
        for i, x in enumerate(rewards)
    )
    return store


def test_G04_groups_without_a_signal_are_dropped_whole_and_the_others_kept_whole(
    case: Any, tmp_path: Path
) -> None:
    store = grouped(tmp_path, case["groups"])
    kept = store.scan(where=informative_groups())
    assert [id[:-1] for id in ids(kept)] == ["mixed"] * 4
    # A predicate on rows does cut groups; a sample of whole groups does not give a fraction of one.
    cut = store.scan("reward > 0.2")
    assert Counter(id[:-1] for id in ids(cut)) == {"const": 4, "mixed": 3}
    whole = stratified_sample(cut, 5, by=None, whole_groups=True)
    assert Counter(id[:-1] for id in ids(whole)) == {"const": 4}


def test_G05_a_short_stratum_gives_all_it_has_and_the_rest_is_refilled(case: Any, tmp_path: Path) -> None:
    sizes, each = case["strata"], case["n_per_stratum"]
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(
        Trajectory(id=f"{name}{i}", source=name, response_tokens=[1], status=DONE)
        for name, size in sizes.items()
        for i in range(size)
    )
    sample = stratified_sample(store.scan(), 2 * each, by="source")
    found = ids(sample)
    assert len(found) == len(set(found)) == 2 * each
    assert Counter(id[0] for id in found) == {"a": 3, "b": 13}
    (gate,) = sample.explain(by="source")  # the shortfall is in the account: 3 of 3, 13 of 20
    assert [(s.value, s.rows_in, s.rows_out) for s in gate.by_task] == [("a", 3, 3), ("b", 20, 13)]
    assert ids(stratified_sample(store.scan(), 0, by="source")) == []
    assert len(ids(stratified_sample(store.scan(), 99, by="source"))) == 23
    with pytest.raises(QueryError, match="n is -1"):
        stratified_sample(store.scan(), -1, by="source")


def test_G06_strata_are_drawn_independently_and_rows_stay_whole(case: Any, tmp_path: Path) -> None:
    assert "2 groups x 6 rows" in case["generator"]
    store = TrajectoryStore.create(tmp_path / "s")
    rows = [
        Trajectory(
            id=f"{name}{i}",
            source=name,
            response_tokens=[i],
            behavior_log_probs=[-float(i)],
            reward=float(i),
            status=DONE,
        )
        for name in "ab"
        for i in range(6)
    ]
    store.append(rows)
    same = 0
    for seed in range(40):
        drawn = stratified_sample(store.scan(), 6, by="source", seed=seed)
        found = list(drawn.to_batch())
        assert Counter(row.source for row in found) == {"a": 3, "b": 3}
        for row in found:
            i = int(row.id[1])
            assert (list(row.tokens), list(row.behavior_log_probs), row.reward) == (
                [i],
                [-float(i)],
                float(i),
            )
        positions = {name: [row.id[1] for row in found if row.source == name] for name in "ab"}
        same += positions["a"] == positions["b"]
        assert ids(stratified_sample(store.scan(), 6, by="source", seed=seed)) == [row.id for row in found]
    assert same < 15  # of 40; by chance 2: one of 20 choices


def test_X02_text_of_a_filter_reads_rows_and_does_nothing_else(case: Any, tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(
        Trajectory(id=name, source=name, response_tokens=[1], reward=1.0, status=DONE)
        for name in ("it's", "O'Brien", "x")
    )
    pwned = Path("/tmp/pains_pwn")
    pwned.unlink(missing_ok=True)
    *hostile, quoted = case["filters"]
    with connect(store) as connection:
        for text in (*hostile, "1=1; DROP VIEW trajectories", "1=1; SELECT 1"):
            with pytest.raises(QueryError):
                connection.sql(f"select id from trajectories where {text}")
            with pytest.raises(QueryError):
                store.scan(where=text).count()
        with pytest.raises(QueryError):
            connection.sql(f"select id from trajectories order by {case['order_by']}")
        good = quoted.replace("env", "source")
        assert connection.sql(f"select id from trajectories where {good}").to_pylist() == [{"id": "it's"}]
        assert ids(store.scan(where=good)) == ["it's"]
        bound = connection.sql("select id from trajectories where source = ?", ["O'Brien"])
        assert bound.to_pylist() == [{"id": "O'Brien"}]
    assert not pwned.exists()
    assert not Path("/tmp/x.db").exists()
    with pytest.raises(QueryError, match="there is no column"):
        store.scan(where='"reward; ATTACH" > 0')
    assert store.scan(where="id = 'x'' OR ''1''=''1'").count() == 0
    with connect(store) as connection:
        spliced = connection.sql("select id from trajectories where id = ?", [case["delete_value"]])
        assert spliced.num_rows == 0
    with pytest.raises(ValidationError, match="is not in the store"):
        store.maintenance.update([case["delete_value"]], {"reward": [0.0]})
    assert store.maintenance.delete(pl.col("id") == case["delete_value"]).rows == 0
    assert store.count() == 3


def test_P01_a_version_that_is_text_is_refused_by_name(case: Any) -> None:
    """An importer turns "2" into 2; a row does not take it silently."""
    text: Any = case["slime_form"]["weight_versions"][0]
    from trajstore import TrajectoryBatch

    with pytest.raises(ValidationError, match="version"):
        TrajectoryBatch([Trajectory(id="a", response_tokens=[1], version=PolicyVersion(text))])
