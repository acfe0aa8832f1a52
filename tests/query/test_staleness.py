"""The conventions of staleness, one test each with its formula, and the gates built on versions."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
from trajstore.query import CONVENTIONS, fresh, informative_groups, mask_stale_tokens, trainable

DONE = TrajectoryStatus.COMPLETED


def mixed(id: str, start: int, newest: int, **fields: Any) -> Trajectory:
    """Started under one version, finished under a newer one: two tokens each."""
    return Trajectory(
        id=id,
        prompt_tokens=[1],
        response_tokens=[2, 3, 4, 5],
        version=PolicyVersion(start),
        version_segments=[
            VersionSegment(1, 3, PolicyVersion(start)),
            VersionSegment(3, 5, PolicyVersion(newest)),
        ],
        status=DONE,
        **fields,
    )


def plain(id: str, version: int | None, **fields: Any) -> Trajectory:
    known = None if version is None else PolicyVersion(version)
    options = {"status": DONE, "version": known} | fields
    return Trajectory(id=id, prompt_tokens=[1], response_tokens=[2, 3], **options)


def store_of(path: Path, *appends: Sequence[Trajectory]) -> TrajectoryStore:
    store = TrajectoryStore.create(path / "store")
    for rows in appends:
        store.append(rows)
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    """Versions 0 … 12 of one token range each, a mixed row, one of unknown version."""
    rows = [plain(f"v{i}", i) for i in range(13)]
    path = tmp_path_factory.mktemp("staleness")
    return store_of(path, rows, [mixed("mixed", 4, 9), plain("unknown", None)])


def kept(store: TrajectoryStore, *args: Any, **options: Any) -> set[str]:
    return set(store.scan(where=fresh(*args, **options)).to_polars()["id"])


def v(low: int, high: int = 12) -> set[str]:
    return {f"v{i}" for i in range(low, high + 1)}


# Conventions: each says what the smallest kept version is when `at` is 10


def test_torchrl(store: TrajectoryStore) -> None:
    """consumer_version - version <= max_staleness, of the oldest version in the row; -1 switches it off."""
    assert kept(store, 10, 4, convention="torchrl") == v(6)
    assert CONVENTIONS["torchrl"].gap(10, 6) == 4
    with pytest.raises(QueryError, match="max_staleness=-1 switches the gate of torchrl off"):
        fresh(10, -1, convention="torchrl")


def test_trl(store: TrajectoryStore) -> None:
    """current - model_version <= max_staleness, of the version a sample was started under."""
    assert kept(store, 10, 6, convention="trl") == v(4) | {"mixed"}
    assert kept(store, 10, 5, convention="trl") == v(5)


def test_miles_drops_the_whole_group(tmp_path: Path) -> None:
    """current - oldest <= max_weight_staleness; a group goes when one member is stale."""
    groups = {"a": [8, 9], "b": [5, 9], None: [9, 3]}
    rows = [
        plain(f"{group}{version}", version, group_id=group)
        for group, versions in groups.items()
        for version in versions
    ]
    store = store_of(tmp_path, rows[:3], rows[3:])
    assert kept(store, 10, 4, convention="miles") == {"a8", "a9", "None9"}
    assert kept(store, 10, 4) == {"a8", "a9", "b9", "None9"}
    assert kept(store, 10, 5, convention="miles") == {"a8", "a9", "b5", "b9", "None9"}


def test_a_stale_member_in_a_file_of_its_own_still_takes_its_group_along(tmp_path: Path) -> None:
    """Statistics could skip that file, and the group would look fresh."""
    store = store_of(tmp_path, [plain("old", 1, group_id="g")], [plain("new", 9, group_id="g")])
    assert kept(store, 10, 4, whole_groups=True) == set()
    assert kept(store, 10, 4) == {"new"}


def test_torchforge(store: TrajectoryStore) -> None:
    """current - policy_version <= max_policy_age."""
    assert kept(store, 10, 3, convention="torchforge") == v(7)


def test_verl_counts_from_one(store: TrajectoryStore) -> None:
    """Dropped when global_steps - prompt_global_steps + 1 > threshold: on-policy data is 1 stale, not 0."""
    assert kept(store, 10, 1, convention="verl") == v(10)
    assert kept(store, 10, 3, convention="verl") == v(8)
    assert kept(store, 10, 0, convention="verl") == v(11)
    assert CONVENTIONS["verl"].gap(10, 10) == 1
    assert kept(store, 10, 7, convention="verl") == v(4) | {"mixed"}  # by the step of its prompt


def test_verls_metric_counts_from_the_step_before(store: TrajectoryStore) -> None:
    """(global_steps - 1) - max_global_steps, and the worst with min: data of the last step is 0 stale."""
    assert CONVENTIONS["verl-metric"].gap(10, 9) == 0
    assert CONVENTIONS["verl-metric-worst"].gap(PolicyVersion(10), PolicyVersion(4)) == 5
    assert kept(store, 10, 0, convention="verl-metric") == v(9) | {"mixed"}
    assert kept(store, 10, 4, convention="verl-metric-worst") == v(5)
    assert kept(store, 10, 5, convention="verl-metric-worst") == v(4) | {"mixed"}


def test_prime_rl_counts_from_the_step_before(store: TrajectoryStore) -> None:
    """(step - 1) - policy.start <= max_off_policy_steps: weights of step k are made at the end of step k."""
    assert kept(store, 10, 0, convention="prime-rl") == v(9)
    assert kept(store, 10, 4, convention="prime-rl") == v(5)
    assert kept(store, 10, 5, convention="prime-rl") == v(4) | {"mixed"}


def test_nemo_rl(store: TrajectoryStore) -> None:
    """start weight version >= current - max_age_steps. (Its exact match of target steps is a predicate.)"""
    assert kept(store, 10, 2, convention="nemo-rl") == v(8)
    assert kept(store, 10, 6, convention="nemo-rl") == v(4) | {"mixed"}


LEAST = {
    **dict.fromkeys(("trajstore", "torchrl", "miles"), 10 - 4),  # of the oldest token
    **dict.fromkeys(("trl", "torchforge", "nemo-rl"), 10 - 6),  # of the start
    "verl": 10 + 1 - 6,
    "prime-rl": 10 - 1 - 6,
    "verl-metric": 10 - 1 - 9,
    "verl-metric-worst": 10 - 1 - 4,
}
"""The least limit that keeps a row of versions 4 to 9 that is named after 6, at 10."""


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_which_version_of_a_mixed_row_counts(tmp_path: Path, convention: str) -> None:
    """A row that was continued: its oldest tokens, the version it is named after and its newest differ."""
    row = plain(
        "continued",
        6,
        version_segments=[VersionSegment(1, 2, PolicyVersion(4)), VersionSegment(2, 3, PolicyVersion(9))],
    )
    store, least = store_of(tmp_path, [row]), LEAST[convention]
    assert kept(store, 10, least, convention=convention) == {"continued"}
    if least:
        assert kept(store, 10, least - 1, convention=convention) == set()


def test_a_convention_that_is_not_known(store: TrajectoryStore) -> None:
    with pytest.raises(QueryError, match="convention is 'verlx', expected one of trajstore, torchrl"):
        fresh(10, 1, convention="verlx")


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_unknown_versions_are_never_fresh_and_newer_ones_always(
    store: TrajectoryStore, convention: str
) -> None:
    found = kept(store, 5, 10**6, convention=convention)
    assert "unknown" not in found
    assert v(0) <= found


# Which version counts


def test_gap_of(store: TrajectoryStore, tmp_path: Path) -> None:
    limits = {"oldest": 6, "start": 6, "newest": 1, "mean": 4}  # versions 4, 4, 9, and 6.5 on average
    for gap_of, limit in limits.items():
        assert "mixed" in kept(store, 10, limit, gap_of=gap_of)
        assert "mixed" not in kept(store, 10, limit - 1, gap_of=gap_of)
    assert kept(store, 10, 4, gap_of="mean") == v(6) | {"mixed"}
    spans = [
        plain("span", None, version_span=(4, 9)),
        plain("one", None, version_span=(9, 9)),
    ]
    other = store_of(tmp_path, spans)
    assert kept(other, 10, 5, gap_of="mean") == {"one"}  # where in the span the tokens are is not known
    assert kept(other, 10, 6, gap_of="oldest") == {"span", "one"}


def test_the_mean_reads_segments_only_when_it_is_asked_for(store: TrajectoryStore) -> None:
    scan = store.scan(where=fresh(10, 4, gap_of="mean"))
    assert scan.count() == 8
    assert scan.to_polars().columns == store.schema.names


# Tolerance by task


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    rows = [
        plain(f"{task}{version}", version, source=task, metadata={"env": {"name": f"{task}-env"}})
        for task in ("math", "code", None)
        for version in (2, 6, 9)
    ]
    return store_of(tmp_path_factory.mktemp("tasks"), rows[:4], rows[4:])


def test_each_task_has_its_own_tolerance(tasks: TrajectoryStore) -> None:
    by_source = {"math": 1, "code": 8, None: 4}
    expected = {"math9", "code2", "code6", "code9", "None6", "None9"}
    assert kept(tasks, 10, by_source, by="source") == expected
    assert kept(tasks, 10, {"code": 8}, by="source", otherwise=1) == {
        "math9",
        "code2",
        "code6",
        "code9",
        "None9",
    }
    by_env = {"math-env": 1, "code-env": 8, "None-env": 4}
    assert kept(tasks, 10, by_env, by="metadata.env.name") == expected


def test_a_task_without_a_tolerance_is_named(tasks: TrajectoryStore) -> None:
    scan = tasks.scan(where=fresh(10, {"math": 1, None: 2}, by="source"))
    with pytest.raises(QueryError, match=r"names no tolerance for source = 'code'\n.*otherwise="):
        scan.count()


def test_no_file_is_skipped_for_the_tolerance_of_another_task(tmp_path: Path) -> None:
    rows = [
        plain("code2", 2, source="code"),
        plain("math2", 2, source="math"),
        plain("math9", 9, source="math"),
    ]
    store = store_of(tmp_path, *([row] for row in rows))
    assert kept(store, 10, {"code": 8}, by="source", otherwise=1) == {"code2", "math9"}
    assert kept(store, 10, {"math": 1}, by="source", otherwise=8) == {"code2", "math9"}
    with pytest.raises(QueryError, match="names no tolerance for source = 'code'"):
        kept(store, 10, {"math": 1}, by="source")  # its only row is too old for any tolerance


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": {"a": 1}}, "max_staleness as a mapping and by= go together"),
        ({"max_staleness": 1, "by": "source"}, "go together"),
        ({"max_staleness": {"a": -1}, "by": "source"}, "max_staleness is -1"),
        ({"max_staleness": {"a": 1}, "by": "source", "otherwise": -2}, "max_staleness is -2"),
        ({"max_staleness": 1, "otherwise": 2}, "otherwise= goes with a mapping"),
        ({"max_staleness": {"a": 1}, "by": 3}, "by is 3, expected a column's name"),
        ({"max_staleness": 2.5}, "max_staleness is 2.5, expected a whole number"),
        ({"max_staleness": {"a": "1"}, "by": "source"}, "max_staleness is '1', expected a whole number"),
    ],
)
def test_tolerances_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        fresh(10, **options)


@pytest.mark.parametrize("at", [None, "10", 10.7])
def test_a_version_is_a_whole_number(at: Any) -> None:
    with pytest.raises(ValidationError, match=f"policy version is {at!r}, expected a whole number"):
        fresh(at, 1)


def test_numpys_whole_numbers_are_as_good(store: TrajectoryStore) -> None:
    assert kept(store, np.int64(10), np.int32(2)) == kept(store, 10, 2)
    by = {"max_staleness": {None: np.int64(2)}, "by": "source", "otherwise": np.int8(0)}
    assert kept(store, 10, **by) == kept(store, 10, 2)


# Training


def test_trainable(tmp_path: Path) -> None:
    rows = [
        plain("done", 1),
        plain("pending", 1, status=TrajectoryStatus.PENDING),
        plain("parent", 1),
        plain("next", 2, parent_id="parent"),
        Trajectory(id="no split", tokens=[1, 2, 3], status=DONE),
        Trajectory(id="masked", tokens=[1, 2, 3], loss_mask=[0, 1, 1], status=DONE),
    ]
    for parts in ([rows], [[row] for row in rows]):
        store = store_of(tmp_path / str(len(parts)), *parts)
        assert set(store.scan(where=trainable()).to_polars()["id"]) == {"done", "next", "masked"}
        store.scan(where=trainable()).to_batch().to_tensors()
    # The continuation may itself have been dropped: its parent stays superseded.
    assert store.scan("id <> 'next'").filter(trainable()).to_polars()["id"].to_list() == ["done", "masked"]


def test_informative_groups_are_kept_and_dropped_whole(tmp_path: Path) -> None:
    rewards = {
        "const": [0.5] * 4,
        "mixed": [0.0, 0.95, 0.95, 0.95],
        "rounding": [0.1 + 0.2, 0.3, 0.3],
        "nan": [math.nan, 1.0],
        "nan mixed": [math.nan, 1.0, 2.0],
        "zero": [0.0, 0.0, 0.0],
        "inf": [math.inf, 1.0, 1.0],
        "inf mixed": [math.inf, 1.0, 2.0],
        "-inf mixed": [-math.inf, 1.0, 2.0],
        "one": [1.0],
        None: [1.0, 2.0],
    }
    rows = [
        plain(f"{name}{i}", 1, group_id=name, reward=reward)
        for name, values in rewards.items()
        for i, reward in enumerate(values)
    ]
    scan = store_of(tmp_path, rows[:7], rows[7:]).scan(where=informative_groups())
    kept = ["mixed"] * 4 + [name for name in ("nan mixed", "inf mixed", "-inf mixed") for _ in range(3)]
    assert [row.group_id for row in scan.to_batch()] == kept


# Masking instead of dropping


def test_stale_tokens_are_masked_and_the_rest_is_trained_on() -> None:
    from trajstore import TrajectoryBatch

    rows = [
        mixed("mixed", 4, 9),
        plain("fresh", 9),
        plain("stale", 4),
        plain("unknown", None),
        plain("span", None, version_span=(4, 9)),
        mixed("given", 4, 9, loss_mask=[0, 1, 1, 0, 1]),
    ]
    batch = TrajectoryBatch(rows)
    masked = mask_stale_tokens(batch, at=PolicyVersion(10), max_staleness=2)
    assert [list(row.loss_mask) for row in masked] == [
        [0, 0, 0, 1, 1], [0, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0, 0, 1]
    ]  # fmt: skip
    assert masked.to_tensors()["loss_mask"].sum().item() == 2 + 2 + 1
    assert all(len(row.loss_mask) == 0 for row in batch[:5])  # the rows that were given stay as they are
    everything = mask_stale_tokens(batch, at=10, max_staleness=100)
    assert [sum(row.loss_mask) for row in everything] == [4, 2, 2, 0, 2, 3]
    none = mask_stale_tokens(TrajectoryBatch([]), at=1, max_staleness=1)
    assert len(none) == 0


def test_a_row_without_a_mask_cannot_be_masked() -> None:
    from trajstore import TrajectoryBatch

    with pytest.raises(ValidationError, match=r"trajectory 1 .id 'b'.*neither loss_mask nor a known split"):
        mask_stale_tokens(
            TrajectoryBatch([plain("a", 1), Trajectory(id="b", tokens=[1, 2])]), at=1, max_staleness=1
        )
