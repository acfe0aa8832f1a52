"""PPO elements against trlX's recorded batches, stored rows and back, and GAE against its formula."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.offline.goldens import golden
from trajstore import (
    InputError,
    SchemaError,
    Trajectory,
    TrajectoryBatch,
    TrajectoryStatus,
    TrajectoryStore,
    ValidationError,
)
from trajstore.loader import TrajectoryLoader
from trajstore.offline.elements import PPORLElement
from trajstore.offline.gae import gae, kl_penalty, whiten
from trajstore.offline.ppo import collate, history, ppo_dataset, ppo_trajectories, recompute
from trajstore.schema import Column, list_of

GOLDEN = golden("ppo_collate")
CASES = GOLDEN["cases"]


def element_of(plain: dict[str, list[Any]]) -> PPORLElement:
    whole = ("query_tensor", "response_tensor")
    return PPORLElement(
        **{n: torch.tensor(v, dtype=torch.int64 if n in whole else torch.float32) for n, v in plain.items()}
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_collate_is_trlx_s(case: dict[str, Any], side: Any) -> None:
    elements = [element_of(plain) for plain in case["elements"]]
    batch = collate(elements, pad_token_id=GOLDEN["pad_token_id"], padding_side=side)
    assert batch.response_masks is None
    for name, expected in case[side].items():
        tensor = getattr(batch, name)
        assert str(tensor.dtype) == f"torch.{case['dtypes'][name]}"
        torch.testing.assert_close(tensor, torch.tensor(expected, dtype=tensor.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_history_is_trlx_s(case: dict[str, Any]) -> None:
    elements = [element_of(plain) for plain in case["elements"]]
    assert history(elements) == case["export_full"]
    assert history(elements, only_text=True) == case["export_only_text"]


def test_collate_refuses_what_it_cannot_do() -> None:
    elements = [element_of(CASES[0]["elements"][0])]
    with pytest.raises(InputError, match="padding_side is 'top'"):
        collate(elements, pad_token_id=0, padding_side="top")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InputError, match="no elements"):
        collate([], pad_token_id=0)


def row(**given: Any) -> Trajectory:
    defaults = {
        "prompt_tokens": [1, 2],
        "response_tokens": [3, 4, 5],
        "log_probs": [-0.5, -0.25, -1.0],
        "values": [0.5, 0.25, 0.125],
        "reward": 2.0,
        "terminated": True,
    }
    return Trajectory(**{**defaults, **given})


def made(*rows: Trajectory, **options: Any) -> Any:
    return ppo_dataset(TrajectoryBatch(rows), **options)


def test_stored_rows_become_elements_and_come_back() -> None:
    rows = [row(), row(prompt_tokens=[7], token_rewards=[0.0, 0.5, 1.0]), row(loss_mask=[0, 0, 1, 0, 1])]
    data = made(*rows)
    first, second, third = data
    assert first.query_tensor.tolist() == [1, 2]
    assert first.response_tensor.tolist() == [3, 4, 5]
    assert first.logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert first.values.tolist() == [0.5, 0.25, 0.125]
    assert first.rewards.tolist() == [0, 0, 2]
    assert second.rewards.tolist() == [0, 0.5, 1]
    assert third.response_mask.tolist() == [1, 0, 1]
    again = made(*ppo_trajectories(list(data), pad_token_id=0))
    for a, b in zip(data, again, strict=True):
        for f in fields(PPORLElement):
            assert torch.equal(getattr(a, f.name), getattr(b, f.name)), f.name
    assert made(row())[0].response_mask is None


def test_the_batch_of_a_set_is_the_collated_elements() -> None:
    data = made(row(), row(prompt_tokens=[7]), row(response_tokens=[8], log_probs=[-1.0], values=[0.0],
                                                    loss_mask=[0, 0, 1]))  # fmt: skip
    for side in ("left", "right"):
        ours, theirs = (
            data.batch(pad_token_id=9, padding_side=side),
            collate(list(data), pad_token_id=9, padding_side=side),
        )
        for f in fields(ours):
            a, b = getattr(ours, f.name), getattr(theirs, f.name)
            assert (a is None and b is None) or torch.equal(a, b), f.name
    assert [len(batch["ids"]) for batch in TrajectoryLoader(data, batch_size=2)] == [2, 1]


def test_masked_response_tokens_bring_their_mask() -> None:
    multi_turn = row(loss_mask=[0, 0, 1, 0, 1])
    batch = made(row(), multi_turn).batch(pad_token_id=0)
    assert batch.response_masks.tolist() == [[1, 1, 1], [1, 0, 1]]
    mixed = collate([made(row())[0], made(multi_turn)[0]], pad_token_id=0)
    assert mixed.response_masks.tolist() == [[1, 1, 1], [1, 0, 1]]
    assert made(row(loss_mask=[0, 0, 1, 1, 0]))[0].rewards.tolist() == [0, 2, 0]


def test_log_probs_are_the_trainer_s_or_by_a_flag_the_engine_s() -> None:
    engine = row(log_probs=[], behavior_log_probs=[-3.0, -2.0, -1.0])
    with pytest.raises(
        ValidationError, match="trajectory 1, column 'log_probs': the row has no log-probs"
    ) as caught:
        made(row(), engine)
    assert 'log_probs="behavior"' in str(caught.value.hint)
    assert made(engine, log_probs="behavior")[0].logprobs.tolist() == [-3, -2, -1]
    both = row(behavior_log_probs=[-3.0, -2.0, -1.0])
    assert made(both, log_probs="behavior")[0].logprobs.tolist() == [-0.5, -0.25, -1]
    with pytest.raises(ValidationError, match="'log_probs': the row has no"):
        made(row(log_probs=[]), log_probs="behavior")
    with pytest.raises(InputError, match="log_probs is 'old'"):
        made(row(), log_probs="old")


def test_what_an_element_needs_is_named() -> None:
    with pytest.raises(ValidationError, match="'values': the row has no values"):
        made(row(values=[]))
    split = {
        "prompt_tokens": [],
        "response_tokens": [],
        "tokens": [1, 2],
        "loss_mask": [0, 1],
        "log_probs": [0.0, -1],
    }
    with pytest.raises(ValidationError, match="'prompt_length': the split"):
        made(row(**split, values=[0.0, 0.0]))
    data = made(row(), row(loss_mask=[0] * 5))
    assert (len(data), data.dropped) == (1, {"nothing in it is trained on": 1})


def test_rows_that_are_not_finished_or_have_no_tokens_need_nothing() -> None:
    bare = {"log_probs": [], "values": []}
    text = Trajectory(id="text", prompt="q", response="a", reward=1.0)
    cut = [row(status=TrajectoryStatus(name), **bare) for name in ("aborted", "failed", "generating")]
    data = made(text, *cut, row(status=TrajectoryStatus.PENDING), row(loss_mask=[0] * 5, **bare))
    assert data.dropped == {
        "not finished: aborted, failed or still generating": 3,
        "nothing in it is trained on": 2,
    }
    (element,) = data
    assert (element.query_tensor.tolist(), element.values.tolist()) == (
        made(row())[0].query_tensor.tolist(),
        made(row())[0].values.tolist(),
    )
    with pytest.raises(ValidationError, match="trajectory 2, column 'values'"):
        made(text, cut[0], row(values=[]))


def test_a_log_prob_that_is_not_finite_is_an_error_or_masked_never_zero() -> None:
    broken = row(log_probs=[-0.5, math.nan, 0.0])
    with pytest.raises(ValidationError, match="the log-prob of a trained token is not finite"):
        made(broken)
    data = made(broken, not_finite="mask")
    assert data[0].response_mask.tolist() == [1, 0, 1]
    assert math.isnan(data[0].logprobs[1])
    assert data.zero_log_probs == 1
    assert made(row(log_probs=[-0.5, math.nan, -1], loss_mask=[0, 0, 1, 0, 1]))[0].response_mask.tolist() == [
        1,
        0,
        1,
    ]


def test_the_kl_penalty_is_paid_on_trained_tokens(tmp_path: Any) -> None:
    column = Column("ref_log_probs", list_of(pa.float32()), "token")
    store = TrajectoryStore.create(tmp_path / "s", extra=[column])
    store.append([row(id="a", loss_mask=[0, 0, 1, 0, 1])])
    store.maintenance.update(["a"], {"ref_log_probs": [[0, 0, -0.75, -9, -2.0]]})
    (element,) = ppo_dataset(store.scan(), reference="ref_log_probs", kl_coefficient=0.5)
    assert element.rewards.tolist() == [-0.5 * 0.25, 0, 2 - 0.5 * 1.0]
    assert kl_penalty(np.array([-1.0]), np.array([-3.0]), 0.1).tolist() == pytest.approx([-0.2])


def test_padding_in_a_response_is_told_by_position() -> None:
    plain = {"query_tensor": [2, 1], "response_tensor": [3, 2, 2, 2], "logprobs": [-1.0, -1.0],
             "values": [0.0, 0.0], "rewards": [0.0, 1.0]}  # fmt: skip
    (back,) = ppo_trajectories([element_of(plain)], pad_token_id=2)
    assert (back.prompt_tokens, back.response_tokens) == ([2, 1], [3, 2])
    with pytest.raises(ValidationError, match="2 response tokens have no value, and not all"):
        ppo_trajectories([element_of(plain)], pad_token_id=0)
    with pytest.raises(ValidationError, match="lengths are"):
        ppo_trajectories([element_of(plain | {"rewards": [1.0]})], pad_token_id=2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.floats(-2, 2)), max_size=6),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
    st.integers(0, 9),
)
def test_gae_is_its_sum_of_deltas(rows: list[tuple[int, float]], gamma: float, lam: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.array([n for n, _ in rows], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rewards, values = rng.normal(size=offsets[-1]), rng.normal(size=offsets[-1])
    bootstrap = np.array([v for _, v in rows])
    advantages, returns = gae(rewards, values, offsets, bootstrap, gamma=gamma, lam=lam)
    for i, (n, last) in enumerate(rows):
        r, v = rewards[offsets[i] : offsets[i + 1]], [*values[offsets[i] : offsets[i + 1]], last]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            expected = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n))
            assert advantages[offsets[i] + t] == pytest.approx(expected)
            assert returns[offsets[i] + t] == pytest.approx(expected + v[t])
    with pytest.raises(InputError, match="gamma is 2"):
        gae(rewards, values, offsets, bootstrap, gamma=2, lam=1)


def test_advantages_are_written_back_to_the_store(tmp_path: Any) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(
        [
            row(id="a", loss_mask=[0, 0, 1, 0, 1]),
            row(id="b", terminated=False, bootstrap_value=4.0, reward=0.0),
        ]
    )
    made_ = recompute(store.scan(), gamma=0.5, lam=1.0)
    store.maintenance.update(
        made_.column("id").to_pylist(), {n: made_.column(n).to_pylist() for n in ("advantages", "returns")}
    )
    a, b = store.scan().to_trajectories()
    assert a.returns == [0, 0, 1, 0, 2]  # from one trained action to the next: the masked one is no step
    assert a.advantages == [0, 0, 0.5, 0, 1.875]
    assert b.returns == [0, 0, 0.5, 1, 2]
    with pytest.raises(ValidationError, match=r"\(id 'c'\), column 'bootstrap_value'"):
        recompute(TrajectoryBatch([row(id="c", terminated=False)]), gamma=1, lam=1)


def test_the_kl_penalty_is_a_column_and_part_of_the_returns(tmp_path: Any) -> None:
    extra = [Column(name, list_of(pa.float32()), "token") for name in ("ref_log_probs", "kl_penalty")]
    store = TrajectoryStore.create(tmp_path / "s", extra=extra)
    store.append([row(id="a", loss_mask=[0, 0, 1, 0, 1])])
    store.maintenance.update(["a"], {"ref_log_probs": [[0, 0, -0.75, -9, -2.0]]})
    made = recompute(store.scan(), gamma=0.5, lam=1.0, reference="ref_log_probs", kl_coefficient=0.5)
    assert made["kl_penalty"].to_pylist() == [[0, 0, -0.125, 0, -0.5]]
    assert made["returns"].to_pylist() == [[0, 0, -0.125 + 0.5 * 1.5, 0, 1.5]]
    ids, *columns = made.to_pydict().items()
    store.maintenance.update(ids[1], dict(columns))
    (stored,) = store.scan().columns(["kl_penalty", "returns"]).to_arrow().to_pylist()
    assert stored["kl_penalty"] == [0, 0, -0.125, 0, -0.5]
    with pytest.raises(SchemaError, match="no column 'other'"):
        recompute(store.scan(), gamma=1, lam=1, reference="other")


def test_whitening_of_equal_values_is_zero() -> None:
    x = np.random.default_rng(0).normal(3, 2, 50)
    white = whiten(x)
    assert (white.mean(), white.std(ddof=1)) == pytest.approx((0, 1))
    assert whiten(x, shift_mean=False).mean() == pytest.approx(x.mean())
    for equal in ([0.1] * 3, [0.35] * 7, [5.0], []):
        assert (whiten(np.array(equal)) == 0).all()
