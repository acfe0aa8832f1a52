"""Weighted draws, allocations and whole groups: their distributions over many seeds, and their edges."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import QueryError
from trajstore.codec import id_hashes
from trajstore.selection import Draw, draw, quotas, race, ranked, seeded_keys, whole_groups
from trajstore.selection.derived import GROUP_MEMBERS, SUPERSEDED


def hashes(count: int) -> Any:
    return id_hashes([f"row {i}" for i in range(count)]).to_numpy()


def chi_square(seen: Any, expected: Any) -> float:
    return float(((seen - expected) ** 2 / expected).sum())


# Weights


def test_the_first_row_of_a_weighted_draw_comes_in_proportion_to_its_weight() -> None:
    weights, seeds = np.array([1.0, 2.0, 3.0, 4.0, 0.0]), 6000
    seen = np.zeros(5)
    for seed in range(seeds):
        seen[int(np.argmin(race(seeded_keys(hashes(5), seed), weights)))] += 1
    assert seen[4] == 0
    expected = weights[:4] / 10 * seeds
    assert chi_square(seen[:4], expected) < 3 + 5 * math.sqrt(2 * 3)


def test_pairs_of_a_weighted_draw_are_those_of_drawing_one_after_the_other() -> None:
    """Each next row in proportion to its weight among those left: p(i, j) = w_i/W · w_j/(W - w_i)."""
    weights, seeds = np.array([1.0, 2.0, 5.0]), 3000
    seen: Counter[tuple[int, int]] = Counter()
    for seed in range(seeds):
        first, second, _ = np.argsort(race(seeded_keys(hashes(3), seed), weights)).tolist()
        seen[first, second] += 1
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    expected = np.array([weights[i] / 8 * weights[j] / (8 - weights[i]) for i, j in pairs]) * seeds
    assert chi_square(np.array([seen[pair] for pair in pairs]), expected) < 5 + 5 * math.sqrt(2 * 5)


def test_equal_weights_give_the_order_of_the_keys() -> None:
    keys = seeded_keys(hashes(500), 3)
    ids = pl.Series([f"row {i}" for i in range(500)])
    plain = ranked(keys, ids)
    for weight in (1.0, 0.25, 1e-6, 1e6):
        assert ranked(keys, ids, race(keys, np.full(500, weight))).tolist() == plain.tolist()


# Quotas


@settings(max_examples=75, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.5, 1.0, 3.0])), min_size=1, max_size=6),
    st.integers(0, 60),
    st.integers(0, 5),
)
def test_quotas_by_weight_fill_n_and_stay_near_their_share(
    strata: list[tuple[int, float]], n: int, seed: int
) -> None:
    sizes = np.array([size for size, _ in strata])
    weights = np.array([weight for _, weight in strata])
    quota = quotas(sizes, n, seeded_keys(np.arange(len(sizes)), seed), weights)
    available = int(sizes[weights > 0].sum())
    assert quota.sum() == min(n, available)
    assert ((quota >= 0) & (quota <= sizes)).all()
    assert (quota[weights == 0] == 0).all()
    room = (quota < sizes) & (weights > 0)
    if room.any():  # who has room left got one level of rows for its weight, to within one row
        level = quota[room] / weights[room]
        slack = 1 / weights[room]
        assert (level.max() - level.min()) <= slack.max() + 1e-6


def test_quotas_by_weight_are_exact_where_they_can_be() -> None:
    keys = seeded_keys(np.arange(3), 0)
    assert quotas(np.array([100, 100, 100]), 12, keys, np.array([1.0, 2.0, 3.0])).tolist() == [2, 4, 6]
    assert quotas(np.array([1, 100, 100]), 13, keys, np.array([1.0, 1.0, 2.0])).tolist() == [1, 4, 8]
    assert quotas(np.array([0, 0, 0]), 5, keys, np.ones(3)).tolist() == [0, 0, 0]
    for word in ("equal", "proportional"):
        assert quotas(np.array([0, 0]), 5, keys[:2], word).tolist() == [0, 0]
        assert quotas(np.array([3, 0]), 5, keys[:2], word).tolist() == [3, 0]


def test_rows_that_cannot_be_drawn_are_not_drawn() -> None:
    keys, ids = seeded_keys(hashes(6), 0), pl.Series([f"row {i}" for i in range(6)])
    strata = np.array([0, 0, 0, 1, 1, 2])
    among = np.array([1, 2, 3, 4])
    assert draw(strata, keys, ids, 10, "equal", among=among).tolist() == [1, 2, 3, 4]
    assert draw(strata, keys, ids, 2, "equal", among=among[1:2]).tolist() == [2]
    assert draw(strata, keys, ids, 10, "equal", among=among[:0]).tolist() == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 3, 40, 700]), min_size=1, max_size=5),
    st.sampled_from([0, 1, 7, 60, 400, 5000]),
    st.integers(0, 5),
    st.sampled_from(["uniform", "all low", "all high", "few"]),
)
def test_of_many_rows_the_first_of_each_stratum_are_drawn(
    sizes: list[int], n: int, seed: int, kind: str
) -> None:
    """Against sorting everything; keys that are not uniform, and equal ones, are drawn just as right."""
    rng = np.random.default_rng(seed)
    strata = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    ids = pl.Series([f"row {i}" for i in rng.permutation(len(strata))])
    keys = seeded_keys(rng.integers(0, 2**62, len(strata)), seed)
    keys = {
        "uniform": keys,
        "all low": keys >> np.uint64(40),
        "all high": keys | np.uint64(0xFF << 56),
        "few": keys % np.uint64(5),
    }[kind]
    rows = draw(strata, keys, ids, n, "proportional").tolist()
    quota = Counter(strata[rows].tolist())
    expected = []
    for code in range(len(sizes)):
        order = sorted(np.flatnonzero(strata == code).tolist(), key=lambda i: (keys[i], ids[i]))
        expected += order[: quota[code]]
    assert rows == sorted(expected)
    assert len(rows) == min(n, len(strata))


# The step


def frame(strata: Sequence[Any], **columns: Any) -> pl.DataFrame:
    names = [f"row {i}" for i in range(len(strata))]
    return pl.DataFrame(
        {"id": names, "id_hash": hashes(len(names)), "stratum": pl.Series(strata, strict=False), **columns}
    )


def drawn(rows: pl.DataFrame, n: int, **how: Any) -> list[int]:
    options = {"by": "stratum", "allocation": "equal", "at": None, "seed": 0} | how
    return Draw(n, **options).keep(rows).tolist()


def test_a_mapping_names_the_strata_and_their_shares() -> None:
    rows = frame(["a"] * 40 + ["b"] * 40 + ["c"] * 40 + [None] * 40)
    found = Counter(i // 40 for i in drawn(rows, 12, allocation={"a": 2, "b": 1, None: 3}))
    assert found == {0: 4, 1: 2, 3: 6}
    assert len(drawn(rows, 200, allocation={"a": 1, "none such": 5})) == 40
    nan = frame([1.0, math.nan, math.nan, 2.0])
    assert drawn(nan, 2, allocation={math.nan: 1}) == [1, 2]
    with pytest.raises(QueryError, match="allocation names 'x', and no stratum is one of them"):
        drawn(rows, 4, allocation={"x": 1})
    assert drawn(rows.clear(), 4, allocation={"x": 1}) == []


def test_by_none_is_one_stratum() -> None:
    rows = frame(range(20))
    assert len(drawn(rows, 7, by=None)) == 7
    assert drawn(rows, 99, by=None) == list(range(20))


def test_weights_within_strata() -> None:
    rows = frame(["a"] * 30 + ["b"] * 30, w=[1.0, 9.0] * 30)
    heavy = [sum(i % 2 for i in drawn(rows, 20, weights="w", seed=seed)) for seed in range(300)]
    quota = Counter(i // 30 for i in drawn(rows, 20, weights="w"))
    assert quota == {0: 10, 1: 10}
    assert 15 < np.mean(heavy) < 18.5
    none = rows.with_columns(w=pl.when(pl.col("id") == "row 3").then(1.0).otherwise(0.0))
    assert drawn(none, 20, weights="w") == [3]
    assert drawn(rows.with_columns(w=0.0), 20, weights="w") == []
    assert drawn(rows, 8, weights=pl.lit(2.0)) == drawn(rows, 8)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, None])
def test_a_weight_that_is_none_is_an_error_that_names_the_row(bad: float | None) -> None:
    rows = frame(["a"] * 3, w=pl.Series([1.0, bad, 1.0], dtype=pl.Float64))
    with pytest.raises(QueryError, match=r"the weight of row 'row 1' is .*expected a number, 0 or more"):
        drawn(rows, 1, weights="w")


def test_freshness_weights_go_by_the_gap_and_leave_the_unknown_out() -> None:
    versions = pl.Series([10, 9, 6, None, 12], dtype=pl.Int64)
    rows = frame(["a"] * 5, oldest_version_id=versions)
    seeds, seen = 800, np.zeros(5)
    for seed in range(seeds):
        (row,) = drawn(rows, 1, by=None, weights="freshness", at=10, seed=seed)
        seen[row] += 1
    assert seen[3] == 0
    weights = np.array([1, 1 / 2, 1 / 5, 1])
    expected = weights / weights.sum() * seeds
    assert chi_square(seen[[0, 1, 2, 4]], expected) < 3 + 5 * math.sqrt(2 * 3)
    with pytest.raises(QueryError, match="needs the current policy version"):
        drawn(rows, 1, by=None, weights="freshness")


# Whole groups


def siblings(groups: dict[str | None, tuple[int, int | None]], **columns: Any) -> pl.DataFrame:
    """Rows of groups given as {name: (completed members, group_size)}, shuffled."""
    names = [name for name, (count, _) in groups.items() for _ in range(count)]
    sizes = [groups[name][1] for name in names]
    rows = frame(
        [0] * len(names),
        group_id=pl.Series(names, dtype=pl.String),
        group_size=pl.Series(sizes, dtype=pl.Int32),
        status=["completed"] * len(names),
        **{SUPERSEDED: [False] * len(names)},
        **columns,
    )
    members = Counter(names)
    return rows.with_columns(pl.Series(GROUP_MEMBERS, [members[name] for name in names], dtype=pl.Int64))


def test_groups_are_drawn_whole_and_n_counts_them() -> None:
    rows = siblings({f"g{i}": (4, 4) for i in range(10)} | {"short": (3, 4), "open": (2, None), None: (3, 1)})
    for n in range(15):
        chosen = rows[drawn(rows, n, by=None, whole_groups=True)]["group_id"].to_list()
        counts = Counter(chosen)
        assert len(counts) == min(n, 11)  # ten of four, and the one of no known size
        assert all(count == (2 if name == "open" else 4) for name, count in counts.items())
        assert "short" not in counts
        assert None not in counts


@pytest.mark.parametrize(
    ("sizes", "whole"), [((3, 0), False), ((0, 3), False), ((2, 0), True), ((0, 0), True)]
)
def test_the_size_of_a_group_is_what_any_member_says(sizes: tuple[int, int], whole: bool) -> None:
    """A member that does not know the size, 0, says nothing of it."""
    two = np.array([2, 2], np.int64)
    found = whole_groups(np.zeros(2, np.int64), np.array(sizes, np.int64), two, np.ones(2, bool))
    assert found.tolist() == [whole]


def test_a_group_that_a_gate_has_cut_is_not_drawn() -> None:
    rows = siblings({"a": (4, 4), "b": (5, 4), "c": (3, None)})
    cut = rows.filter(~pl.col("id").is_in(["row 4", "row 9"]))  # b still has 4 of 4, c has 2
    assert set(cut[drawn(cut, 9, by=None, whole_groups=True)]["group_id"]) == {"a"}


def test_members_that_do_not_count_are_not_drawn() -> None:
    rows = siblings({"a": (3, 2)})
    aborted = rows.with_columns(
        status=pl.Series(["completed", "aborted", "completed"]), **{GROUP_MEMBERS: pl.lit(2)}
    )
    assert drawn(aborted, 1, by=None, whole_groups=True) == [0, 2]
    replaced = rows.with_columns(pl.Series(SUPERSEDED, [True, False, False]), pl.lit(2).alias(GROUP_MEMBERS))
    assert drawn(replaced, 1, by=None, whole_groups=True) == [1, 2]


def test_a_group_goes_by_its_worst_member() -> None:
    versions = [9, 5, 9, 9, 9, None]
    rows = siblings(
        {"old": (2, 2), "new": (2, 2), "unknown": (2, 2)},
        oldest_version_id=pl.Series(versions, dtype=pl.Int64),
    )
    how = {"by": "version_gap", "at": 10, "whole_groups": True}
    by_gap = {5: [0, 1], 1: [2, 3], None: [4, 5]}
    for gap, expected in by_gap.items():
        assert drawn(rows, 9, allocation={gap: 1}, **how) == expected
    seen: Counter[int] = Counter()
    for seed in range(200):
        chosen = drawn(rows, 1, by=None, at=10, whole_groups=True, weights="freshness", seed=seed)
        seen[chosen[0]] += 1
    assert seen[4] == 0
    share = (1 / 6) / (1 / 6 + 1 / 2)
    assert abs(seen[0] / 200 - share) < 5 * math.sqrt(share * (1 - share) / 200)


def test_groups_are_equally_likely_whatever_their_size() -> None:
    rows = siblings({f"g{i}": (1 + 6 * i, None) for i in range(5)})
    seeds, seen = 200, Counter()  # type: ignore[var-annotated]  # counts names
    for seed in range(seeds):
        chosen = rows[drawn(rows, 2, by=None, whole_groups=True, seed=seed)]["group_id"]
        seen.update(set(chosen))
    counts = np.array([seen[f"g{i}"] for i in range(5)])
    share = 2 / 5
    assert ((counts - share * seeds) ** 2).sum() / (share * (1 - share) * seeds) < 4 + 5 * math.sqrt(2 * 4)


def test_one_giant_group() -> None:
    rows = siblings({"giant": (5000, 5000)})
    assert drawn(rows, 1, by=None, whole_groups=True) == list(range(5000))
    assert drawn(rows, 0, by=None, whole_groups=True) == []


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.integers(0, 6),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_groups_do_not_depend_on_the_order_of_the_rows(
    sizes: list[int], n: int, seed: int, random: Any
) -> None:
    rows = siblings({f"g{i}": (size, size) for i, size in enumerate(sizes)})
    order = list(range(len(rows)))
    random.shuffle(order)
    moved = rows[order]
    how = {"by": None, "whole_groups": True, "seed": seed}
    plain = set(rows[drawn(rows, n, **how)]["id"])
    assert set(moved[drawn(moved, n, **how)]["id"]) == plain
