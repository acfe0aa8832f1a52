"""The pass over a store: sums a row against plain loops, in any order of files, with little memory."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import PolicyVersion, QueryError, Trajectory, TrajectoryBatch, TrajectoryStore
from trajstore.query import blocks, measures
from trajstore.query.measures import CLIP, MEASURES, measure
from trajstore.query.survey import facts, importance_ratio, survey

log_probs = st.floats(-20, 0, width=32) | st.sampled_from([0.0, math.nan, -math.inf, 0.5])


@st.composite
def rows(draw: st.DrawFn) -> Trajectory:
    prompt, response = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    total = prompt + response
    fields: dict[str, Any] = {}
    for name in ("attention_mask", "loss_mask", "action_mask"):
        if draw(st.booleans()):
            fields[name] = draw(st.lists(st.integers(0, 1), min_size=total, max_size=total))
    for name in ("log_probs", "behavior_log_probs"):
        if draw(st.booleans()):
            fields[name] = draw(st.lists(log_probs, min_size=total, max_size=total))
    tokens = draw(st.lists(st.integers(0, 3), min_size=total, max_size=total))
    if draw(st.booleans()):
        return Trajectory(tokens=tokens, prompt_length=prompt, response_length=response, **fields)
    return Trajectory(tokens=tokens, **fields)


def naive(row: Trajectory) -> dict[str, Any]:
    """What MEASURES says, token by token."""
    total = len(row.tokens)
    known = row.prompt_length + row.response_length == total and (total == 0 or row.prompt_length >= 0)
    known = known and (row.prompt_length > 0 or row.response_length > 0 or total == 0)
    prompt = row.prompt_length if known else total + 1
    loss = list(row.loss_mask) or [int(t >= prompt) for t in range(total)]
    action = list(row.action_mask) or loss
    hidden = [not a for a in row.attention_mask] or [False] * total
    b, p = list(row.behavior_log_probs), list(row.log_probs)
    sampled = [t for t in range(total) if action[t]]
    bad = {t for t in sampled if (b and not math.isfinite(b[t])) or (p and not math.isfinite(p[t]))}
    ratios = [float(p[t]) - float(b[t]) for t in sampled if b and p and t not in bad]
    weights = [math.exp(r) for r in ratios]
    early = [known and prompt - 1 <= t < total - 1 for t in range(total)]
    inside = known and 0 < prompt < total
    return {
        "actions": sum(action),
        "loss_tokens": sum(loss),
        "has_split": bool(row.loss_mask) or known,
        "loss_on_prompt": sum(loss[:prompt]) if known else 0,
        "loss_off_action": sum(m for m, a in zip(loss, action, strict=True) if not a)
        if row.action_mask
        else 0,
        "loss_off_attention": sum(m for m, h in zip(loss, hidden, strict=True) if h),
        "mask_shifted": bool(row.loss_mask) and inside and loss == early,
        "log_probs_shifted": bool(b) and inside and [x != 0 for x in b] == early,
        "has_behavior": bool(b),
        "has_log_probs": bool(p),
        "behavior_zero": sum(b[t] == 0 for t in sampled) if b else 0,
        "behavior_positive": sum(b[t] > 0.001 for t in sampled) if b else 0,
        "not_finite": len(bad),
        "ratio_tokens": len(ratios),
        "log_ratio_sum": sum(ratios),
        "log_ratio_abs": sum(map(abs, ratios)),
        "log_ratio_max": max(map(abs, ratios), default=0.0),
        "k2_sum": sum(r * r for r in ratios) / 2,
        "k3_sum": sum(math.expm1(r) - r for r in ratios),
        "clipped_low": sum(w < 1 - CLIP for w in weights),
        "clipped_high": sum(w > 1 + CLIP for w in weights),
        "log_weight": math.log(sum(weights)) if weights else -math.inf,
        "log_weight_squared": math.log(sum(w * w for w in weights)) if weights else -math.inf,
    }


@given(st.lists(rows(), min_size=1, max_size=8), st.sampled_from([1, 7, 1 << 16]))
@settings(max_examples=40, deadline=None)
def test_the_sums_are_those_of_plain_loops(trajectories: list[Trajectory], block: int) -> None:
    batch = TrajectoryBatch(trajectories)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        found = measure(batch.to_arrow())
    for i, row in enumerate(batch):
        for name, expected in naive(row).items():
            close = 1e-6 if name.startswith("log_weight") else 1e-9  # exponentials of float32
            assert found[name][i] == pytest.approx(expected, rel=close, abs=close / 1000), (name, row)
    assert set(found) == set(MEASURES)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=2, max_size=10))
@settings(max_examples=40, deadline=None)
def test_hashes_name_the_tokens_and_their_order(responses: list[list[int]]) -> None:
    made = [Trajectory(prompt_tokens=[7] * (i % 3), response_tokens=r) for i, r in enumerate(responses)]
    found = measure(TrajectoryBatch(made).to_arrow())
    for i, left in enumerate(responses):
        for j, right in enumerate(responses):
            # The response's hash does not depend on how long the prompt is.
            assert (found["response_hash"][i] == found["response_hash"][j]) == (left == right)
            assert (found["prompt_hash"][i] == found["prompt_hash"][j]) == (i % 3 == j % 3)


@given(st.lists(rows(), max_size=8))
@settings(max_examples=40, deadline=None)
def test_the_mean_importance_ratio(trajectories: list[Trajectory]) -> None:
    batch = TrajectoryBatch(trajectories)
    found = survey(batch).frame
    tokens = found["ratio_tokens"].sum()
    expected = found["log_weight"].exp().sum() / tokens if tokens else math.nan
    assert importance_ratio(batch) == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_ratios_that_overflow_stay_finite_where_they_can() -> None:
    row = Trajectory(response_tokens=[1, 2], log_probs=[-1.0, -1.0], behavior_log_probs=[-801.0, -1.0])
    found = measure(TrajectoryBatch([row]).to_arrow())
    assert found["log_weight"][0] == pytest.approx(800.0)
    assert found["log_weight_squared"][0] == pytest.approx(1600.0)
    assert found["k3_sum"][0] == math.inf
    row = Trajectory(response_tokens=[1], log_probs=[-500.0], behavior_log_probs=[-1.0])
    assert measure(TrajectoryBatch([row]).to_arrow())["log_weight"][0] == pytest.approx(-499.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    """Versions arrive out of order, so that files hold the rows in another order than they came in."""
    store = TrajectoryStore.create(tmp_path_factory.mktemp("survey") / "store")
    rng = np.random.default_rng(0)
    for part in range(3):
        store.append(
            [
                Trajectory(
                    id=f"{part}-{i}",
                    prompt_tokens=[1, 2],
                    response_tokens=[3] * (1 + i % 7),
                    behavior_log_probs=-rng.random(1 + i % 7),
                    version=PolicyVersion(int(rng.integers(0, 9))) if i % 5 else None,
                    metadata={"task": f"t{i % 2}", "deep": {"er": i}} if i % 3 else None,
                    source="run",
                )
                for i in range(1500)
            ]
        )
    store.maintenance.compact()
    return store


def test_rows_come_in_the_order_of_the_scan(store: TrajectoryStore) -> None:
    found = survey(store).frame
    table = store.scan().to_arrow()
    assert found["id"].to_list() == table["id"].to_pylist()
    whole = measure(table.combine_chunks())
    for name, values in whole.items():
        assert np.array_equal(found[name].to_numpy(), values), name


def test_fewer_measures_are_the_same_and_read_fewer_columns(store: TrajectoryStore) -> None:
    whole, some = survey(store).frame, survey(store, measures=measures.DRIFT).frame
    assert set(some.columns) == (set(whole.columns) - set(MEASURES)) | set(measures.DRIFT)
    assert some.equals(whole.select(some.columns))
    assert "tokens" not in measures.columns_of(measures.DRIFT)
    for name in MEASURES:
        columns = ["length", "prompt_length", *measures.columns_of([name])]
        alone = measure(store.scan().to_arrow().select(columns), [name])
        assert list(alone) == [name]
        assert np.array_equal(alone[name], whole[name].to_numpy())
    with pytest.raises(QueryError, match="there is no measure 'nothing'"):
        survey(store, measures=["nothing"])


def test_a_narrowed_scan_is_surveyed_alone(store: TrajectoryStore) -> None:
    scan = store.scan("length > 5").limit(100)
    found = survey(scan).frame
    assert found["id"].to_list() == scan.to_arrow()["id"].to_pylist()
    assert found["actions"].to_list() == [n - 2 for n in scan.to_arrow()["length"].to_pylist()]
    assert len(survey(store.scan("length > 99"))) == 0


def test_every_row_group_is_decoded_once(store: TrajectoryStore) -> None:
    pieces = list(store.scan().pieces(["length"]))
    assert sum(len(positions) for positions, _ in pieces) == 4500
    assert max(len(positions) for positions, _ in pieces) <= 1024
    assert sorted(np.concatenate([p for p, _ in pieces]).tolist()) == list(range(4500))


def test_gaps_are_signed_and_unknown_ones_are_null(store: TrajectoryStore) -> None:
    found = facts(store, at=5).frame
    oldest = store.scan().to_arrow()["oldest_version_id"].to_pylist()
    assert found["gap"].dtype == pl.Int64
    assert found["gap"].to_list() == [None if v is None else 5 - v for v in oldest]
    assert min(g for g in found["gap"].to_list() if g is not None) == -3
    assert facts(store).at == 8, "the newest version there is, unless said"
    assert facts(store, at=PolicyVersion(5)).at == 5


def test_a_task_is_a_column_or_a_key_of_the_metadata(store: TrajectoryStore) -> None:
    assert set(facts(store).frame["task"]) == {"run"}
    assert set(facts(store, by="metadata.task").frame["task"]) == {"t0", "t1", None}
    assert facts(store, by="metadata.deep.er").frame["task"][1] == "1"
    assert facts(store, by="version_id").frame["task"].dtype == pl.String
    with pytest.raises(QueryError, match="there is no column 'nothing'"):
        facts(store, by="nothing")
    with pytest.raises(QueryError, match="'tokens' is a list"):
        facts(store, by="tokens")
    with pytest.raises(QueryError, match=r"no row has metadata\.tsk\n  hint: .* deep, task$"):
        facts(store, by="metadata.tsk")
    with pytest.raises(QueryError, match=r"no row has metadata\.tsk\n  hint: the rows have no metadata"):
        facts(store.scan("metadata is null"), by="metadata.tsk")


def test_an_empty_store(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    found = survey(store)
    assert len(found) == 0
    assert found.at is None
    assert set(MEASURES) <= set(found.frame.columns)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_only_a_mask_that_is_one_place_early_is_shifted(first: int) -> None:
    marks = [0] * first + [1] * 3 + [0] * (3 - first)
    row = Trajectory(prompt_tokens=[7, 7], response_tokens=[1, 1, 1, 1], loss_mask=marks)
    response = Trajectory(
        prompt_tokens=[7] * 3, response_tokens=[1, 1, 1], loss_mask=marks, behavior_log_probs=marks
    )
    found = measure(TrajectoryBatch([row, response]).to_arrow())
    assert found["mask_shifted"].tolist() == [False, first == 2]
    assert found["log_probs_shifted"].tolist() == [False, first == 2]


def test_a_shift_is_told_whatever_row_comes_next() -> None:
    """The next row has no prompt: its first token is of a response, and not of the row before."""
    early = [0, 1, 1, 0]
    row = Trajectory(
        prompt_tokens=[7, 7],
        response_tokens=[1, 1],
        loss_mask=early,
        behavior_log_probs=[-float(m) for m in early],
    )
    next_ = Trajectory(tokens=[1, 1], prompt_length=0, response_length=2)
    right = Trajectory(prompt_tokens=[7, 7], response_tokens=[1, 1], loss_mask=[0, 0, 1, 1])
    found = measure(TrajectoryBatch([row, next_, right, next_, row]).to_arrow())
    assert found["mask_shifted"].tolist() == [True, False, False, False, True]
    assert found["log_probs_shifted"].tolist() == [True, False, False, False, True]
