"""The doctor: sound rows have no finding, and each fault is found where it is and nowhere else."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore import (
    PolicyVersion,
    Trajectory,
    TrajectoryBatch,
    TrajectoryStatus,
    TrajectoryStore,
    VersionSegment,
)
from trajstore.query.checks import CHECKS, LEVELS, Finding
from trajstore.query.doctor import doctor

GROUP = 4
RESPONSE = 6


def sound(i: int, **fields: Any) -> Trajectory:
    """A row as it should be: group i // 4, one version for each 32 rows, rewards that differ."""
    rng = np.random.default_rng(i)
    log_probs = -rng.uniform(0.1, 2, RESPONSE)
    at = PolicyVersion(i // 32)
    return replace(
        Trajectory(
            id=f"r{i}",
            group_id=f"g{i // GROUP}",
            group_size=GROUP,
            prompt_tokens=[1, 2, i // GROUP],
            response_tokens=rng.integers(3, 1000, RESPONSE),
            behavior_log_probs=log_probs,
            log_probs=log_probs + rng.normal(0, 0.001, RESPONSE),
            log_probs_version=at.version_id,
            reward=float(i % 2),
            version=at,
            version_known="exact",
            status=TrajectoryStatus.COMPLETED,
            finish_reason="stop",
            terminated=True,
            source="run",
        ),
        **fields,
    )


def run(count: int = 128) -> list[Trajectory]:
    return [sound(i) for i in range(count)]


def changed(indices: Sequence[int], **fields: Any) -> list[Trajectory]:
    rows = run()
    for i in indices:
        rows[i] = replace(rows[i], **fields)
    return rows


FULL = 3 + RESPONSE


@dataclass
class Fault:
    """Rows with one fault: which check finds it, how bad, and in which rows."""

    check: str
    level: str
    rows: Callable[[], list[Trajectory]]
    ids: list[str]
    at: int | None = None
    by: str = "source"
    also: tuple[str, ...] = ()


def names(indices: Sequence[int]) -> list[str]:
    return [f"r{i}" for i in indices]


def _skewed() -> list[Trajectory]:
    """Recomputed one version later, and one token has nearly all the weight."""
    rows = [replace(r, log_probs_version=4) if i >= 96 else r for i, r in enumerate(run())]
    rows[100].log_probs = np.array(rows[100].behavior_log_probs) + np.array([12.0, 0, 0, 0, 0, 0])
    return rows


def _growing() -> list[Trajectory]:
    return [
        sound(i, response_tokens=[i] * n, behavior_log_probs=[-1.0] * n, log_probs=[])
        for i in range(128)
        for n in [6 + i // 32]
    ]


FAULTS = [
    Fault(
        "misaligned-mask",
        "error",
        lambda: changed([5], loss_mask=[0, 0, *[1] * 6, 0], behavior_log_probs=[-1.0] * FULL, log_probs=[]),
        names([5]),
    ),
    Fault(
        "misaligned-log-probs",
        "error",
        lambda: changed([5], behavior_log_probs=[0, 0, *[-1.0] * 6, 0], log_probs=[]),
        names([5]),
    ),
    Fault(
        "loss-on-prompt",
        "error",
        lambda: changed([5], loss_mask=[1] * FULL, log_probs=[], behavior_log_probs=[-1.0] * FULL),
        names([5]),
    ),
    Fault(
        "loss-on-environment",
        "error",
        lambda: changed([5], action_mask=[0, 0, 0, 1, 1, 0, 0, 1, 1], loss_mask=[0, 0, 0, *[1] * 6]),
        names([5]),
    ),
    Fault("loss-on-hidden", "error", lambda: changed([5], attention_mask=[1] * 8 + [0]), names([5])),
    Fault(
        "no-loss-mask",
        "warning",
        lambda: [
            *run(),
            Trajectory(
                id="x",
                tokens=[1, 2],
                status=TrajectoryStatus.COMPLETED,
                behavior_log_probs=[-1.0, -1.0],
                version=PolicyVersion(3),
            ),
        ],
        ["x"],
    ),
    Fault(
        "no-tokens",
        "warning",
        lambda: changed(
            [5],
            prompt="asked",
            response="said",
            prompt_tokens=[],
            response_tokens=[],
            behavior_log_probs=[],
            log_probs=[],
        ),
        names([5]),
    ),
    Fault(
        "empty-loss",
        "warning",
        lambda: changed([5], loss_mask=[0] * FULL, action_mask=[0, 0, 0, *[1] * 6]),
        names([5]),
    ),
    Fault(
        "nan-reward",
        "error",
        lambda: changed([5, 6], reward=math.nan) + changed([7], reward=math.inf)[7:8],
        names([5, 6, 7]),
        also=("duplicate-id", "duplicate-response", "oversized-group"),
    ),
    Fault(
        "nan-log-prob",
        "error",
        lambda: changed([5], behavior_log_probs=[-1.0, math.nan, -1.0, -1.0, -math.inf, -1.0]),
        names([5]),
    ),
    Fault(
        "zero-behavior-log-probs",
        "error",
        lambda: changed([5], behavior_log_probs=[0.0] * RESPONSE, log_probs=[]),
        names([5]),
    ),
    Fault(
        "positive-log-prob",
        "error",
        lambda: changed([5], behavior_log_probs=[0.9, 0.5, 0.1, 0.2, 0.7, 0.3], log_probs=[]),
        names([5]),
    ),
    Fault(
        "no-behavior-log-probs",
        "warning",
        lambda: changed([5], behavior_log_probs=[], log_probs=[]),
        names([5]),
    ),
    Fault(
        "retokenized",
        "warning",
        lambda: changed([5], tokens_retokenized=True, behavior_log_probs=[], log_probs=[]),
        names([5]),
    ),
    Fault(
        "copied-log-probs",
        "warning",
        lambda: [
            replace(
                r,
                response_tokens=[9] * 8,
                behavior_log_probs=[-1.0] * 8,
                log_probs=[-1.0] * 8,
                log_probs_version=3,
            )
            if r.id == "r5"
            else r
            for r in run()
        ],
        names([5]),
    ),
    Fault("log-probs-version", "note", lambda: changed([100], log_probs_version=None), names([100])),
    Fault("negative-gap", "warning", run, names(range(96, 128)), at=2),
    Fault("unknown-version", "warning", lambda: changed([5], version=None, version_known=None), names([5])),
    Fault(
        "no-version-boundaries",
        "note",
        lambda: changed([5], version=None, version_span=(0, 2), version_known="span"),
        names([5]),
        also=("mixed-versions",),
    ),
    Fault(
        "mixed-versions",
        "note",
        lambda: changed(
            [5],
            version_segments=[
                VersionSegment(3, 5, PolicyVersion(0)),
                VersionSegment(5, 9, PolicyVersion(2)),
            ],
        ),
        names([5]),
    ),
    Fault(
        "starved-task",
        "warning",
        lambda: changed(range(32), source="hard"),
        names(range(32)),
    ),
    Fault(
        "engine-mismatch",
        "warning",
        lambda: [
            replace(r, log_probs=np.array(r.behavior_log_probs) + 0.2 * (-1) ** i)
            for i, r in enumerate(run())
        ],
        names(range(128)),
    ),
    Fault("low-ess", "warning", _skewed, names(range(96, 128))),
    Fault(
        "group-of-one",
        "warning",
        lambda: [*run(), sound(128, group_size=None, version=PolicyVersion(3), log_probs_version=3)],
        names([128]),
    ),
    Fault("incomplete-group", "note", lambda: run()[:-1], names([124, 125, 126])),
    Fault(
        "oversized-group",
        "warning",
        lambda: [
            *run(),
            sound(130, group_id="g0", prompt_tokens=[1, 2, 0], version=PolicyVersion(3), log_probs_version=3),
        ],
        names([0, 1, 2, 3, 130]),
    ),
    Fault("mixed-prompts", "warning", lambda: changed([5], prompt_tokens=[1, 2, 7]), names([4, 5, 6, 7])),
    Fault("zero-variance-group", "note", lambda: changed([4, 5, 6, 7], reward=0.1), names([4, 5, 6, 7])),
    Fault("duplicate-id", "warning", lambda: changed([5], id="r6"), ["r6", "r6"]),
    Fault(
        "duplicate-response",
        "note",
        lambda: changed([5], response_tokens=sound(4).response_tokens),
        names([5]),
    ),
    Fault("truncated", "note", lambda: changed([5], finish_reason="length", terminated=False), names([5])),
    Fault(
        "not-completed",
        "note",
        lambda: changed([4, 5, 6, 7], status=TrajectoryStatus.ABORTED),
        names([4, 5, 6, 7]),
    ),
    Fault("length-growth", "note", _growing, names(range(96, 128))),
]


def check(found: list[Finding], fault: Fault) -> None:
    (mine,) = [f for f in found if f.check == fault.check]
    assert mine.level == fault.level
    assert list(mine.ids) == fault.ids
    assert mine.rows == len(fault.ids)
    assert f"{mine.rows:,} row" in mine.what
    assert mine.next
    assert {f.check for f in found} <= {fault.check, *fault.also}, "nothing else is wrong"


def test_sound_rows_have_no_finding() -> None:
    assert doctor(TrajectoryBatch(run())) == []
    assert doctor(TrajectoryBatch()) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.check)
def test_a_fault_is_found_where_it_is(fault: Fault) -> None:
    check(doctor(TrajectoryBatch(fault.rows()), at=fault.at, by=fault.by), fault)


def _store(tmp_path: Path, batches: Sequence[tuple[str, list[Trajectory]]]) -> TrajectoryStore:
    store = TrajectoryStore.create(tmp_path / "s")
    count: dict[str, int] = {}
    for writer, rows in batches:
        store.append(rows, writer_id=writer, batch_no=count.setdefault(writer, 0))
        count[writer] += 1
    return store


def of_version(start: int, version: int) -> list[Trajectory]:
    """A group; its clock says the contrary of its version, and nobody asks clocks."""
    at = PolicyVersion(version, timestamp=1e9 - 100 * version)
    return [sound(i, version=at, log_probs_version=version) for i in range(start, start + GROUP)]


def test_a_writer_that_goes_back(tmp_path: Path) -> None:
    ahead = [("a", of_version(0, 0)), ("a", of_version(4, 1)), ("a", of_version(8, 2))]
    store = _store(tmp_path, ahead)
    assert doctor(store) == []
    store.append(of_version(12, 1), writer_id="a", batch_no=3)
    (found,) = doctor(store)
    assert (found.check, found.level, list(found.ids)) == (
        "version-backwards",
        "warning",
        names(range(12, 16)),
    )
    store.append(of_version(16, 3), writer_id="a", batch_no=4)
    store.maintenance.compact()
    assert [f.ids for f in doctor(store)] == [found.ids], "found by the writer's order, not by that of files"


def test_a_server_that_stays_behind(tmp_path: Path) -> None:
    batches = [("slow", of_version(0, 0))]
    batches += [("fast", of_version(4 * (1 + v), v)) for v in range(5)]
    store = _store(tmp_path, batches)
    assert doctor(store) == [], "it wrote in time, and then no more"
    store.append(of_version(40, 1), writer_id="slow", batch_no=1)
    (found,) = doctor(store)
    assert (found.check, list(found.ids)) == ("stale-server", names(range(40, 44)))
    assert "(slow) is 3 versions behind" in found.what


def test_every_check_has_a_fault_here() -> None:
    faults = {fault.check for fault in FAULTS} | {"version-backwards", "stale-server"}
    source = "".join(
        path.read_text() for path in (Path(__file__).parents[2] / "trajstore/query/checks").glob("r*.py")
    )
    for check in faults:
        assert f'"{check}"' in source
    assert source.count("yield from found(") == len(faults)
    assert len(CHECKS) == len(faults) - 1, "one check tells of groups that are too small and too large"


def test_the_worst_come_first() -> None:
    rows = changed([5], reward=math.nan, finish_reason="length")
    rows[9] = replace(rows[9], tokens_retokenized=True, behavior_log_probs=[], log_probs=[])
    levels = [LEVELS.index(f.level) for f in doctor(TrajectoryBatch(rows))]
    assert levels == sorted(levels)
    assert len(set(levels)) == 3


def test_many_rows_make_a_note_a_warning() -> None:
    def level(check: str, rows: list[Trajectory]) -> str:
        (found,) = [f for f in doctor(TrajectoryBatch(rows)) if f.check == check]
        return found.level

    assert level("truncated", changed(range(40), finish_reason="length")) == "warning"
    assert level("zero-variance-group", changed(range(64), reward=1.0)) == "warning"
    same = [sound(4).response_tokens if i % 2 else r.response_tokens for i, r in enumerate(run())]
    rows = [replace(r, response_tokens=t) for r, t in zip(run(), same, strict=True)]
    assert level("duplicate-response", rows) == "warning"
    assert level("not-completed", changed(range(40), status=TrajectoryStatus.FAILED)) == "warning"


def test_a_store_without_any_version_or_log_prob_is_not_scolded_for_each_row() -> None:
    rows = changed(range(128), version=None, version_known=None, behavior_log_probs=[], log_probs=[])
    assert {f.check: f.level for f in doctor(TrajectoryBatch(rows))} == {
        "unknown-version": "note",
        "no-behavior-log-probs": "note",
    }


def test_a_store_of_text_alone_is_told_once_what_it_is_good_for() -> None:
    rows = [
        Trajectory(
            id=str(i),
            prompt="p",
            response=str(i),
            group_id=f"g{i // 4}",
            reward=float(i % 2),
            version=PolicyVersion(0),
            status=TrajectoryStatus.COMPLETED,
        )
        for i in range(40)
    ]
    assert {f.check: f.level for f in doctor(TrajectoryBatch(rows))} == {"no-tokens": "note"}


@pytest.mark.parametrize(("value", "check"), [(0.0, "zero-behavior-log-probs"), (0.7, "positive-log-prob")])
def test_what_is_no_log_prob_is_not_blamed_on_the_engine(value: float, check: str) -> None:
    rows = changed(range(128), behavior_log_probs=[value] * RESPONSE)
    rows[40].log_probs = np.array([-9.0] + [-0.001] * (RESPONSE - 1))
    found = doctor(
        TrajectoryBatch([replace(r, log_probs_version=4) if i < 64 else r for i, r in enumerate(rows)])
    )
    assert [(f.check, f.rows) for f in found] == [(check, 128)]


@pytest.mark.parametrize(("size", "levels"), [(None, ["note"]), (1, []), (4, ["warning"])])
def test_groups_that_are_all_of_one(size: int | None, levels: list[str]) -> None:
    rows = [replace(r, group_id=r.id, group_size=size) for r in run()]
    found = [f for f in doctor(TrajectoryBatch(rows)) if f.check == "group-of-one"]
    assert [f.level for f in found] == levels
    assert all(f.rows == len(rows) for f in found)
