"""Gates, predicates, strata and the seeded draw, on frames without a store."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import PolicyVersion, QueryError
from trajstore.codec import id_hashes
from trajstore.query import fresh
from trajstore.selection import (
    VERSION_OF,
    Draw,
    Limit,
    Where,
    draw,
    scalar_columns,
    seeded_keys,
    stratum_codes,
)

TYPES = {"id": True, "reward": True, "length": True, "status": True, "terminated": True, "tokens": False}

# Gates

version = st.none() | st.integers(-5, 15)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(version, version, version), max_size=12),
    st.integers(-3, 12),
    st.integers(0, 6),
    st.sampled_from(["oldest", "start", "newest"]),
)
def test_fresh_keeps_a_gap_up_to_the_limit(
    versions: list[tuple[int | None, ...]], at: int, limit: int, gap_of: Any
) -> None:
    names = {"oldest": "oldest_version_id", "start": "version_id", "newest": "newest_version_id"}
    frame = pl.DataFrame(versions, dict.fromkeys(names.values(), pl.Int64), orient="row")
    place = list(names).index(gap_of)
    kept = []
    for i, row in enumerate(versions):
        chosen = row[place]
        if chosen is not None and at - chosen <= limit:
            kept.append(i)
    gate = fresh(PolicyVersion(at), limit, gap_of=gap_of)
    assert gate == fresh(at, limit, gap_of=gap_of)
    assert gate.columns({}) == {names[gap_of]} == {VERSION_OF[gap_of]}
    assert gate.keep(frame).tolist() == kept
    low, high = gate.bounds[names[gap_of]]
    assert (low, high) == (at - limit, None)


def test_fresh_keeps_what_is_newer_than_the_trainer_and_never_the_unknown() -> None:
    frame = pl.DataFrame({"oldest_version_id": [3, 99, None, 2]})
    assert fresh(at=5, max_staleness=2).keep(frame).tolist() == [0, 1]


def test_a_gate_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(QueryError, match="max_staleness is -1, expected 0 or more"):
        fresh(at=5, max_staleness=-1)
    with pytest.raises(QueryError, match="gap_of is 'mid', expected one of oldest, start, newest"):
        fresh(at=5, max_staleness=1, gap_of="mid")  # type: ignore[arg-type]  # on purpose


# Predicates

REWARDS = [1.0, 6.0, math.nan, None, -math.inf, math.inf]
FRAME = pl.DataFrame(
    {"id": list("abcdef"), "reward": REWARDS, "length": range(6), "terminated": [True, False, None] * 2}
)


def kept(predicate: Any, frame: pl.DataFrame = FRAME) -> str:
    return "".join(frame["id"][Where(predicate, str(predicate)).keep(frame).tolist()])


@pytest.mark.parametrize(
    ("predicate", "ids"),
    [
        ("reward > 5", "bcf"),  # NaN is above every number
        ("reward < 5", "ae"),
        ("not (reward > 5)", "ae"),  # null is not true, and neither is its negation
        ("reward is null", "d"),
        ("reward = null", ""),
        ("reward <> 6", "acef"),
        ("terminated", "ad"),
        ("not terminated", "be"),
        ("length between 2 and 3 or id = 'a'", "acd"),
        ("id in ('f', 'b')", "bf"),
        ("true", "abcdef"),
        ("1 = 2", ""),
        (pl.col("reward").is_nan(), "c"),
        (pl.col("reward") > pl.col("reward").filter(pl.col("reward").is_finite()).mean(), "bcf"),
        (pl.lit(True), "abcdef"),
    ],
    ids=str,
)
def test_a_row_stays_when_the_predicate_is_true(predicate: Any, ids: str) -> None:
    assert kept(predicate) == ids


@pytest.mark.parametrize("predicate", ["true", "reward > 5", pl.lit(False)], ids=str)
def test_a_predicate_on_no_rows_keeps_none(predicate: Any) -> None:
    assert kept(predicate, FRAME.clear()) == ""


@pytest.mark.parametrize(
    ("predicate", "message"),
    [
        ("reward >", "cannot read the predicate 'reward >'"),
        ("", "cannot read the predicate ''"),
        ("reward > 1; drop table x", "cannot read"),
        ("select 1", "cannot read"),
        ("isnan(reward)", "cannot read"),
        ("reward", "'reward' gives Float64, expected true or false for each row"),
        ("id", "gives String"),
        ("null", "gives Null"),
        ("reward > 'a'", "cannot evaluate"),
        ("count(*) > 1 and max(length) > 2", "gives 1 values for 6 rows"),
        (pl.col("reward").filter(pl.col("reward") > 5) > 5, "gives 3 values for 6 rows"),
    ],
    ids=str,
)
def test_a_predicate_that_says_no_truth_for_each_row_is_refused(predicate: Any, message: str) -> None:
    with pytest.raises(QueryError) as caught:
        kept(predicate)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("nope > 1", "there is no column 'nope'\n.*id, length, reward, status"),
        ("reward > tokens", "column 'tokens' is a list"),
        ("version_gap < 3", "no column 'version_gap'"),
        (pl.all() > 0, "stands for several columns"),
        (pl.col("reward", "length") > 0, "stands for several columns"),
        (pl.col("^re.*$") > 0, "stands for several columns"),
    ],
    ids=str,
)
def test_columns_of_a_predicate_are_known_before_it_runs(expression: Any, message: str) -> None:
    with pytest.raises(QueryError, match=f"(?s){message}"):
        Where(expression, str(expression)).columns(TYPES)


def test_columns_of_a_predicate() -> None:
    assert Where("reward > 1 and status = 'x'", "").columns(TYPES) == {"reward", "status"}
    assert scalar_columns(pl.lit(1), TYPES) == set()


def test_limit_keeps_the_first() -> None:
    assert Limit(2).keep(FRAME).tolist() == [0, 1]
    assert Limit(0).keep(FRAME).tolist() == []
    assert Limit(99).keep(FRAME).tolist() == list(range(6))


# Strata


def test_null_and_nan_are_strata_and_codes_do_not_depend_on_order() -> None:
    values = pl.Series([2.0, None, math.nan, 1.0, -math.nan, None, -0.0, 0.0])
    codes = stratum_codes(values)
    assert codes[1] == codes[5] != codes[0]
    assert codes[2] == codes[4]
    assert codes[6] == codes[7]
    assert set(codes.tolist()) == set(range(5))
    moved = np.random.default_rng(0).permutation(8)
    assert stratum_codes(values[moved.tolist()]).tolist() == codes[moved].tolist()


@pytest.mark.parametrize(
    "values", [[math.nan], [math.nan, math.nan], [1.0, 2.0, math.nan], [None], [None, None]]
)
def test_strata_of_values_that_come_sorted(values: list[float | None]) -> None:
    """A join of sorted columns, the obvious way, loses NaN."""
    series = pl.Series(values, dtype=pl.Float64).set_sorted()
    codes = stratum_codes(series)
    assert codes.dtype == np.int64
    distinct = list(dict.fromkeys(map(repr, values)))
    assert codes.tolist() == [distinct.index(repr(value)) for value in values]


@pytest.mark.parametrize(
    "values",
    [
        pl.Series(["b", None, "a", "b"]),
        pl.Series([True, None, False, True]),
        pl.Series(["b", None, "a", "b"], dtype=pl.Categorical),
        pl.Series([{"x": 2}, None, {"x": 1}, {"x": 2}]),
        pl.Series([[2], None, [1], [2]]),
    ],
    ids=lambda series: str(series.dtype),
)
def test_strata_of_any_type(values: pl.Series) -> None:
    codes = stratum_codes(values)
    assert codes[0] == codes[3]
    assert sorted(set(codes.tolist())) == [0, 1, 2]


# The draw


def drawn(
    strata: Sequence[Any], n: int, *, seed: int = 0, ids: Sequence[str] | None = None, **how: Any
) -> list[int]:
    frame = frame_of(strata, ids)
    options = {"by": "stratum", "allocation": "equal", "at": None} | how
    return Draw(n, seed=seed, **options).keep(frame).tolist()


def frame_of(strata: Sequence[Any], ids: Sequence[str] | None = None) -> pl.DataFrame:
    names = [f"row {i}" for i in range(len(strata))] if ids is None else list(ids)
    hashes = pl.Series(id_hashes(names).to_numpy(), dtype=pl.Int64)
    return pl.DataFrame({"id": pl.Series(names, dtype=pl.String), "id_hash": hashes}).with_columns(
        pl.Series("stratum", strata, strict=False)
    )


stratum_sizes = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def strata_of(sizes: Sequence[int]) -> list[int]:
    return [code for code, size in enumerate(sizes) for _ in range(size)]


@settings(max_examples=100, deadline=None)
@given(stratum_sizes, st.integers(0, 90), st.integers(0, 5))
def test_equal_quotas_are_a_water_level(sizes: list[int], n: int, seed: int) -> None:
    strata = strata_of(sizes)
    rows = drawn(strata, n, seed=seed)
    assert rows == sorted(set(rows))
    assert len(rows) == min(n, len(strata))
    quota = Counter(strata[i] for i in rows)
    open_strata = [quota[code] for code, size in enumerate(sizes) if quota[code] < size]
    if open_strata:
        assert max(open_strata) - min(open_strata) <= 1
        assert max(quota.values(), default=0) <= min(open_strata) + 1


@settings(max_examples=100, deadline=None)
@given(stratum_sizes, st.integers(0, 90), st.integers(0, 5))
def test_proportional_quotas_go_by_largest_remainder(sizes: list[int], n: int, seed: int) -> None:
    strata = strata_of(sizes)
    rows = drawn(strata, n, seed=seed, allocation="proportional")
    n = min(n, len(strata))
    assert len(rows) == n
    quota = Counter(strata[i] for i in rows)
    shares = [(size * n // len(strata), size * n % len(strata)) for size in sizes]
    up = [rest for code, (whole, rest) in enumerate(shares) if quota[code] == whole + 1]
    down = [rest for code, (whole, rest) in enumerate(shares) if quota[code] == whole]
    assert len(up) + len(down) == len(sizes)
    assert not up or not down or min(up) >= max(down)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([0.5, 1.5, None, math.nan]), max_size=25),
    st.integers(0, 12),
    st.sampled_from(["equal", "proportional"]),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_the_same_rows_whatever_their_order(
    strata: list[float | None], n: int, allocation: str, seed: int, random: Any
) -> None:
    ids = [f"row {i}" for i in range(len(strata))]
    plain = {ids[i] for i in drawn(strata, n, ids=ids, allocation=allocation, seed=seed)}
    order = list(range(len(strata)))
    random.shuffle(order)
    moved_ids = [ids[i] for i in order]
    moved = drawn([strata[i] for i in order], n, ids=moved_ids, allocation=allocation, seed=seed)
    assert {moved_ids[i] for i in moved} == plain
    again = drawn(strata, n, ids=ids, allocation=allocation, seed=seed)
    assert {ids[i] for i in again} == plain


@pytest.mark.parametrize("allocation", ["equal", "proportional"])
def test_ids_that_repeat_are_drawn_alike_whatever_their_order(allocation: str) -> None:
    """One id in three strata: neither keys nor ids tell the rows apart, only their strata do."""
    strata = [2.0, 1.0, None, math.nan] * 3
    rows = list(zip(strata, ["same"] * 12, strict=True))
    expected = None
    for shuffle in range(10):
        moved = [rows[i] for i in np.random.default_rng(shuffle).permutation(12)]
        chosen = drawn([s for s, _ in moved], 5, ids=[name for _, name in moved], allocation=allocation)
        found = Counter(repr(moved[i][0]) for i in chosen)
        assert sum(found.values()) == 5
        expected = expected or found
        assert found == expected


def test_a_seed_gives_one_draw_and_another_seed_another() -> None:
    strata = strata_of([20, 20])
    draws = [tuple(drawn(strata, 10, seed=seed)) for seed in (0, 1, 2, -1, 2**63)]
    assert len(set(draws)) == 5
    assert tuple(drawn(strata, 10, seed=1)) == draws[1]


def test_a_draw_is_pinned() -> None:
    """The order of a seed is a promise: changing the mix would change every recorded sample."""
    assert drawn(strata_of([5, 5, 5]), 6, seed=7) == [1, 2, 6, 7, 10, 12]
    assert seeded_keys(np.array([0, 1, -1]), 0).tolist() == [
        12035550249420947055,
        627405149472732430,
        3303439293501059696,
    ]


def test_small_and_large_draws() -> None:
    strata = strata_of([3, 1, 2])
    assert drawn(strata, 0) == []
    assert drawn(strata, 6) == drawn(strata, 100) == list(range(6))
    assert len({strata[i] for i in drawn(strata, 2)}) == 2
    assert Counter(strata[i] for i in drawn(strata, 5)) == {0: 2, 1: 1, 2: 2}
    assert drawn([], 3) == drawn([], 0) == []


def test_null_and_nan_take_their_own_share() -> None:
    strata = [1.0] * 10 + [None] * 10 + [math.nan] * 10
    rows = drawn(strata, 9)
    assert Counter(i // 10 for i in rows) == {0: 3, 1: 3, 2: 3}


def test_a_stratum_may_be_any_expression() -> None:
    frame = frame_of(range(10))
    by_half = Draw(4, pl.col("stratum") // 5, "equal", None, 0).keep(frame)
    assert Counter(int(i) // 5 for i in by_half) == {0: 2, 1: 2}
    assert len(Draw(4, pl.lit("all"), "equal", None, 0).keep(frame)) == 4
    with pytest.raises(QueryError, match="gives 1 values for 10 rows"):
        Draw(4, pl.col("stratum").max(), "equal", None, 0).keep(frame)
    with pytest.raises(QueryError, match="cannot evaluate"):
        Draw(4, pl.col("stratum") + pl.col("id").str.to_integer(), "equal", None, 0).keep(frame)


def test_the_version_gap_is_the_oldest_versions() -> None:
    frame = frame_of([0] * 6).with_columns(oldest_version_id=pl.Series([9, 9, 9, 2, None, 12]))
    rows = Draw(4, "version_gap", "equal", 10, 0).keep(frame).tolist()
    assert rows[1:] == [3, 4, 5]
    assert rows[0] in (0, 1, 2)
    with pytest.raises(QueryError, match="needs the current policy version"):
        Draw(4, "version_gap", "equal", None, 0).keep(frame)


# Fairness, over many seeds; a statistic may be 5 sigma off


def test_rows_of_a_stratum_are_equally_likely() -> None:
    sizes, n, seeds = [10, 20, 30], 12, 3000
    strata = np.array(strata_of(sizes))
    ids = pl.Series([f"row {i}" for i in range(len(strata))])
    hashes = id_hashes(ids.to_list()).to_numpy()
    seen = np.zeros(len(strata))
    together = np.zeros((10, 10))
    for seed in range(seeds):
        keys = seeded_keys(hashes, seed)
        rows = draw(strata, keys, ids, n, "equal")
        seen[rows] += 1
        first = rows[rows < 10]
        together[np.ix_(first, first)] += 1
    for code, size in enumerate(sizes):
        share = 4 / size
        counts = seen[strata == code]
        assert counts.sum() == 4 * seeds
        chi_square = ((counts - share * seeds) ** 2).sum() / (share * (1 - share) * seeds)
        assert abs(chi_square - (size - 1)) < 5 * np.sqrt(2 * (size - 1))
    pairs = together[np.triu_indices(10, 1)] / seeds  # rows do not come in company either
    chance = 4 / 10 * 3 / 9
    assert np.abs(pairs - chance).max() < 5 * np.sqrt(chance * (1 - chance) / seeds)


@pytest.mark.parametrize(("n", "level"), [(1, 0), (2, 0), (6, 1)])
def test_a_large_stratum_wins_no_tie_by_its_size(n: int, level: int) -> None:
    sizes, seeds = [2, 20, 200, 2000], 2000
    strata = np.array(strata_of(sizes))
    ids = pl.Series([f"row {i}" for i in range(len(strata))])
    hashes = id_hashes(ids.to_list()).to_numpy()
    more = np.zeros(len(sizes))
    for seed in range(seeds):
        keys = seeded_keys(hashes, seed)
        more += np.bincount(strata[draw(strata, keys, ids, n, "equal")], minlength=4) - level
    share = (n - 4 * level) / 4
    assert np.abs(more / seeds - share).max() < 5 * np.sqrt(share * (1 - share) / seeds)


def test_remainders_that_tie_are_shared_fairly() -> None:
    strata, seeds = np.array(strata_of([50, 50, 50])), 3000
    ids = pl.Series([f"row {i}" for i in range(len(strata))])
    hashes = id_hashes(ids.to_list()).to_numpy()
    more = np.zeros(3)
    for seed in range(seeds):
        keys = seeded_keys(hashes, seed)
        more += np.bincount(strata[draw(strata, keys, ids, 31, "proportional")]) - 10
    assert np.abs(more / seeds - 1 / 3).max() < 5 * np.sqrt(2 / 9 / seeds)
