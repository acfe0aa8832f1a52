"""The SQL views and macros, and the polars expressions of the same names, against plain Python."""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from trajstore import PolicyVersion, QueryError, Trajectory, TrajectoryStatus, TrajectoryStore, VersionSegment
from trajstore.plan import Recipe, plan
from trajstore.query import connect
from trajstore.schema import Column, list_of

RNG = np.random.default_rng(7)


def rollout(i: int) -> Trajectory:
    """Lengths 3 … 10; some with segments and a tool gap, some without version, masks, or log-probs."""
    prompt, response = 2 + i % 2, 1 + i % 7
    length = prompt + response
    segments: list[VersionSegment] = []
    if i % 5 == 4 and response >= 3:  # token prompt + 1 is a tool's
        segments = [
            VersionSegment(prompt, prompt + 1, PolicyVersion(i)),
            VersionSegment(prompt + 2, length, PolicyVersion(i + 2)),
        ]
    mask = [0] * prompt + [1] * response
    if segments:
        mask[prompt + 1] = 0
    return Trajectory(
        id=f"r{i:02}",
        group_id=f"g{i // 4}",
        group_size=4,
        prompt_tokens=list(range(prompt)),
        response_tokens=list(range(100, 100 + response)),
        loss_mask=mask if i % 3 == 0 or segments else [],
        action_mask=[0] * prompt + [1] * response if i % 4 == 1 and not segments else [],
        log_probs=RNG.normal(-1, 0.4, length).tolist() if i % 4 else [],
        behavior_log_probs=RNG.normal(-1, 0.4, length).tolist(),
        reward=[0.1, 0.1, 0.1, 1.0][i % 4] if i // 4 % 2 else 0.35,
        version=None if i % 6 == 5 else PolicyVersion(i),
        version_segments=segments,
        status=TrajectoryStatus.ABORTED if i == 3 else TrajectoryStatus.COMPLETED,
    )


ROWS = [rollout(i) for i in range(24)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    extra = [Column("entropy", list_of(pa.float32()), role="token")]
    store = TrajectoryStore.create(tmp_path_factory.mktemp("views") / "store", extra=extra)
    store.append(ROWS[:9])
    store.append(ROWS[9:])
    ids, values = [row.id for row in ROWS[:5]], [[0.5] * row.total_length for row in ROWS[:5]]
    store.maintenance.update(ids, {"entropy": values})
    return store


def ask(source: Any, query: str, **options: Any) -> list[dict[str, Any]]:
    with connect(source, **options) as connection:
        return connection.sql(query).to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped


# Views


def version_of(row: Trajectory, t: int) -> int | None:
    if row.version_segments:
        return next((s.version.version_id for s in row.version_segments if s.start <= t < s.end), None)
    return None if row.version is None else row.version.version_id


@pytest.mark.parametrize("narrowed", [False, True])
def test_tokens_have_their_own_version_masks_and_log_ratio(store: TrajectoryStore, narrowed: bool) -> None:
    source = store.scan("true") if narrowed else store
    found = ask(source, "select * from tokens order by id, position", current_version=20)
    expected = 0
    for row in ROWS:
        tokens = [*row.prompt_tokens, *row.response_tokens]
        prompt = len(row.prompt_tokens)
        default = [int(t >= prompt) for t in range(len(tokens))]
        loss = list(row.loss_mask) or default
        for t, token in enumerate(tokens):
            got = found[expected]
            expected += 1
            version = version_of(row, t)
            assert (got["id"], got["position"], got["token"]) == (row.id, t, token)
            assert got["in_prompt"] == (t < prompt)
            assert got["version_id"] == version
            assert got["version_gap"] == (None if version is None else 20 - version)
            assert got["loss_mask"] == loss[t]
            assert got["action_mask"] == (list(row.action_mask) or loss)[t]
            assert got["entropy"] == (0.5 if row in ROWS[:5] else None)
            if row.log_probs:
                assert got["log_ratio"] == pytest.approx(
                    row.log_probs[t] - row.behavior_log_probs[t], abs=1e-6
                )
            else:
                assert got["log_ratio"] is None
    assert len(found) == expected


def test_tokens_of_a_row_whose_versions_have_no_boundaries_are_not_guessed(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    store.append([Trajectory(id="a", prompt_tokens=[1], response_tokens=[2, 3], version_span=(2, 6))])
    found = ask(store, "select version_id, log_ratio from tokens", current_version=6)
    assert found == [{"version_id": None, "log_ratio": None}] * 3


def test_segments(store: TrajectoryStore) -> None:
    found = ask(store, "select * from segments order by id, segment", current_version=20)
    expected = [
        (row.id, n, s.start, s.end, s.end - s.start, s.version.version_id, 20 - s.version.version_id)
        for row in ROWS
        for n, s in enumerate(row.version_segments)
    ]
    keys = ("id", "segment", "start", "end", "tokens", "version_id", "version_gap")
    assert [tuple(row[key] for key in keys) for row in found] == expected
    assert expected


def test_groups(store: TrajectoryStore) -> None:
    found = {row["group_id"]: row for row in ask(store, "from groups", current_version=20)}
    assert len(found) == 6
    for name, got in found.items():
        members = [row for row in ROWS if row.group_id == name]
        done = [row for row in members if row.is_complete]
        rewards = [row.reward for row in done]
        assert (got["rows"], got["size"], got["group_size"]) == (4, len(done), 4)
        assert got["mean_reward"] == pytest.approx(np.mean(rewards))
        assert got["std_reward"] == pytest.approx(np.std(rewards, ddof=1), abs=1e-12)
        assert got["zero_variance"] == (len(set(rewards)) == 1)
        assert got["passed"] == len(rewards)
        known = [
            v
            for row in members
            for v in [version_of(row, t) for t in range(row.total_length)]
            if v is not None
        ]
        assert got["version_gap"] == 20 - min(known)


def test_a_group_of_rewards_that_are_not_finite(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    rewards = {"a": [math.nan, 1.0, 1.0], "b": [math.inf, 0.0, 1.0], "c": [math.nan], "d": [0.5]}
    store.append(
        Trajectory(
            group_id=group,
            prompt_tokens=[1],
            response_tokens=[2],
            reward=x,
            status=TrajectoryStatus.COMPLETED,
        )
        for group, values in rewards.items()
        for x in values
    )
    found = ask(
        store, "select group_id, not_finite, mean_reward, zero_variance, passed from groups order by 1"
    )
    assert [tuple(row.values()) for row in found] == [
        ("a", 1, 1.0, True, 2), ("b", 1, 0.5, False, 1), ("c", 1, None, False, 0), ("d", 0, 0.5, False, 1)
    ]  # fmt: skip


def test_batches_are_those_of_the_plan(store: TrajectoryStore) -> None:
    lengths = [row.total_length for row in ROWS]
    empty = plan(np.empty(0, np.int64), Recipe(batch_size=4))
    plans = {"mine": [np.array([0, 5, 6]), np.array([23])], "empty": empty}
    found = ask(store, "from batches order by batch", plans=plans)
    assert [(row["plan"], row["rows"], row["tokens"], row["longest"]) for row in found] == [
        ("mine", 3, lengths[0] + lengths[5] + lengths[6], max(lengths[0], lengths[5], lengths[6])),
        ("mine", 1, lengths[23], lengths[23]),
    ]
    for row in found:
        assert row["padding_ratio"] == pytest.approx(1 - row["tokens"] / (row["rows"] * row["longest"]))
        assert row["padded_tokens"] == row["rows"] * row["longest"]
    own = ask(
        store, "select plan, sum(rows) as rows, sum(tokens) as tokens from batches group by 1 order by 1"
    )
    assert own == [{"plan": p, "rows": 24, "tokens": sum(lengths)} for p in ("bucketed", "row order")]
    assert ask(store.at(0), "from batches") == []
    joined = "select count(*) as n from batches, trajectories where plan = 'mine'"
    assert ask(store, joined, plans=plans) == [{"n": 48}]


def test_a_view_that_misses_its_columns_is_not_there(store: TrajectoryStore) -> None:
    with connect(store.scan(columns=["id", "reward"])) as connection:
        assert connection.sql("select count(*) as n from trajectories").to_pylist() == [{"n": 24}]
        for view in ("tokens", "groups", "segments"):
            with pytest.raises(QueryError, match=f"{view} does not exist"):
                connection.sql(f"select * from {view}")


def test_time_travel(store: TrajectoryStore) -> None:
    count = "select count(*) as n from tokens"
    assert ask(store.at(1), count) == [{"n": sum(row.total_length for row in ROWS[:9])}]
    assert ask(store.at(1), "select count(*) as n from groups") == [{"n": 3}]


# Which columns are read


QUERIES = [
    "select count(*) as n from trajectories",
    "select id, reward from trajectories where length > 5 and status = 'completed' order by id",
    "select version_gap, count(*) as n from trajectories group by 1 order by 1",
    "select max(x) as m from (select length * 2 as x from trajectories)",
    "with t as (select group_id from trajectories) select count(*) as n from t a join t b using (group_id)",
    "select sum(length) as s, padding_ratio(length) as p from trajectories",
    "select id from trajectories where exists (select 1 from groups g where g.zero_variance) order by 1",
    "select * exclude (ingested_at) from trajectories order by id limit 2",
    "select t from (select id, unnest(tokens) as t from trajectories where id = 'r03') order by t",
    "select count(tokens) as n, count(loss_mask) as m from trajectories",
    "select trajectories from trajectories order by id limit 1",
    "select id from trajectories where loss_mask is null order by 1",
    "select len(tokens) as n, length from trajectories order by id",
    "select columns('.*_length') from trajectories order by id",
    "select typeof(tokens) as t, typeof(length) as u from trajectories limit 1",
    "select id from trajectories where id > 'r1' and id <> 'r12' and reward > 0.2 order by 1",
]


@pytest.mark.parametrize("query", QUERIES)
def test_scalars_in_memory_and_the_files_answer_alike(store: TrajectoryStore, query: str) -> None:
    with connect(store, current_version=20) as connection:
        found = connection.sql(query)
        files = connection._open(connection._rows.everything())
        assert found.to_pylist() == files.sql(query).to_arrow_table().to_pylist()
        files.close()


@pytest.mark.parametrize("query", QUERIES[:7])
def test_a_query_of_scalars_reads_no_list(tmp_path: Path, query: str) -> None:
    """With the bytes of every list column destroyed, SQL over scalars still works."""
    import pyarrow.parquet as pq

    store = TrajectoryStore.create(tmp_path / "store")
    store.append(ROWS)
    (path,) = map(Path, store.scan().data_files())
    damaged = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(0)
    for chunk in (group.column(i) for i in range(group.num_columns)):
        if ".list." in chunk.path_in_schema:
            start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
            damaged[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(damaged)
    with connect(store, current_version=20) as connection:
        assert connection.sql(query).num_rows
        with pytest.raises(QueryError):
            connection.sql("select tokens from trajectories")


# Macros and expressions: the same names, the same numbers

PAIRS = [
    *product([-0.5, -1.25, 0.0, -30.0], [-0.75, -1.25, 0.0, -12.0]),
    *((math.nan, -1.0), (-1.0, math.nan), (-math.inf, -1.0), (None, -1.0), (-1.0, None)),
]


def by_sql(store: TrajectoryStore, expression: str, columns: dict[str, Sequence[Any]]) -> list[Any]:
    names = ", ".join(columns)
    rows = ", ".join(
        "(" + ", ".join("null" if v is None else f"'{v}'::double" for v in row) + ")"
        for row in zip(*columns.values(), strict=True)
    )
    found = ask(store, f"select {expression} as x from (values {rows}) t({names})")
    return [row["x"] for row in found]


def close(left: Sequence[Any], right: Sequence[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if a is None or b is None:
            return a is b
        return (math.isnan(a) and math.isnan(b)) or a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)

    return len(left) == len(right) and all(map(same, left, right))


EXPECTED: dict[str, Any] = {
    "importance_ratio": lambda p, q: math.exp(p - q),
    "kl_k1": lambda p, q: q - p,
    "kl_k2": lambda p, q: (p - q) ** 2 / 2,
    "kl_k3": lambda p, q: math.exp(p - q) - 1 - (p - q),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_token_macros(store: TrajectoryStore, name: str) -> None:
    p, q = zip(*PAIRS, strict=True)
    expected = [None if None in pair else EXPECTED[name](*pair) for pair in PAIRS]
    frame = pl.DataFrame({"p": p, "q": q}, strict=False)
    assert close(by_sql(store, f"{name}(p, q)", {"p": p, "q": q}), expected)
    assert close(frame.select(getattr(pl.col("p").traj, name)("q")).to_series().to_list(), expected)


def test_a_truncated_ratio_keeps_nan(store: TrajectoryStore) -> None:
    p, q = zip(*PAIRS, strict=True)
    expected = []
    for a, b in PAIRS:
        if a is None or b is None:
            expected.append(None)
        else:
            ratio = math.exp(a - b)
            expected.append(ratio if math.isnan(ratio) else min(ratio, 2.0))
    frame = pl.DataFrame({"p": p, "q": q}, strict=False)
    found = frame.select(pl.col("p").traj.truncated_importance_ratio(pl.col("q"), 2.0)).to_series()
    assert close(by_sql(store, "truncated_importance_ratio(p, q, 2.0)", {"p": p, "q": q}), expected)
    assert close(found.to_list(), expected)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 2.0, None], [0.3], [0.0, 0.0], [], [5.0, 0.0, 1e-3]])
def test_ess(store: TrajectoryStore, weights: list[float | None]) -> None:
    known = [w for w in weights if w is not None]
    squares = sum(w * w for w in known)
    expected = [sum(known) ** 2 / squares if squares else None]
    frame = pl.DataFrame({"w": pl.Series(weights, dtype=pl.Float64)})
    assert close(frame.select(pl.col("w").traj.ess()).to_series().to_list(), expected)
    if weights:
        assert close(by_sql(store, "ess(w)", {"w": weights}), expected)


@pytest.mark.parametrize("lengths", [[1, 2, 3], [4, 4], [7], [0, 0], [0, 5, None]])
def test_padding_ratio(store: TrajectoryStore, lengths: list[int | None]) -> None:
    known = [n for n in lengths if n is not None]
    size = len(known) * max(known)
    expected = [1 - sum(known) / size if size else None]
    frame = pl.DataFrame({"n": pl.Series(lengths, dtype=pl.UInt32)})
    assert close(frame.select(pl.col("n").traj.padding_ratio()).to_series().to_list(), expected)
    assert close(by_sql(store, "padding_ratio(n)", {"n": lengths}), expected)


def test_pass_at_k_is_the_unbiased_estimate(store: TrajectoryStore) -> None:
    cases = [(n, c, k) for n in (1, 2, 8, 64, 500) for c in {0, 1, n // 2, n} for k in (0, 1, 2, 8, 64)]
    for k in (0, 1, 2, 8, 64):
        rows = [(n, c) for n, c, at in cases if at == k]
        expected = [1 - math.comb(n - c, k) / math.comb(n, k) if 1 <= k <= n else None for n, c in rows]
        n, c = zip(*rows, strict=True)
        assert close(by_sql(store, f"pass_at_k(n, c, {k})", {"n": n, "c": c}), expected)
        frame = pl.DataFrame({"n": n, "c": c})
        assert close(frame.select(pl.col("n").traj.pass_at_k("c", k)).to_series().to_list(), expected)


def test_version_gaps_are_signed(store: TrajectoryStore) -> None:
    """Case P03: unsigned versions would wrap to 4294967294."""
    frame = pl.DataFrame({"v": pl.Series([3, 5, 7, None], dtype=pl.UInt32)})
    found = frame.select(pl.col("v").traj.version_gap(PolicyVersion(5))).to_series().to_list()
    assert found == [2, 0, -2, None]
    query = "select version_gap(5, v) as x from (values (3::uint32), (5), (7), (null)) t(v)"
    assert [row["x"] for row in ask(store, query)] == found


def test_a_result_has_the_name_of_its_column() -> None:
    frame = pl.DataFrame({"a": [1, 2], "b": [3, 4], "passed": [1, 0]})
    found = frame.select(
        pl.col("a").traj.version_gap(5),
        pl.col("b").traj.padding_ratio(),
    )
    assert found.columns == ["a", "b"]
    assert frame.select(pl.col("b").traj.pass_at_k("passed", 2)).columns == ["b"]
    for name in ("log_ratio", "importance_ratio", "kl_k1", "kl_k2", "kl_k3"):
        assert frame.select(getattr(pl.col("a").traj, name)("b")).columns == ["a"]
    assert frame.select(pl.col("a").traj.truncated_importance_ratio("b", 2.0)).columns == ["a"]
    assert frame.select(pl.col("b").traj.ess()).columns == ["b"]


def test_sql_and_polars_agree_on_the_stores_own_tokens(store: TrajectoryStore) -> None:
    query = (
        "select group_id, avg(kl_k3(log_probs, behavior_log_probs)) as k3,"
        " ess(importance_ratio(log_probs, behavior_log_probs)) as n from tokens"
        " where loss_mask = 1 and log_probs is not null group by 1 order by 1"
    )
    tokens = pl.from_arrow(connect(store).sql("from tokens"))
    assert isinstance(tokens, pl.DataFrame)
    ratio = pl.col("log_probs").traj.importance_ratio("behavior_log_probs")
    expected = (
        tokens.filter((pl.col("loss_mask") == 1) & pl.col("log_probs").is_not_null())
        .group_by("group_id")
        .agg(k3=pl.col("log_probs").traj.kl_k3("behavior_log_probs").mean(), n=ratio.traj.ess())
        .sort("group_id")
    )
    found = ask(store, query)
    assert [row["group_id"] for row in found] == expected["group_id"].to_list()
    for name in ("k3", "n"):
        assert close([row[name] for row in found], expected[name].to_list())
