"""The sound builder against a reference that walks token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import (
    InputError,
    LengthMismatchError,
    Trajectory,
    TrajectoryBatch,
    TrajectoryStatus,
    ValidationError,
)
from trajstore.errors import SchemaError
from trajstore.loader import TrajectoryLoader
from trajstore.offline import ILQLDataset, ilql_dataset
from trajstore.offline.elements import ILQLBatch, ILQLElement
from trajstore.offline.ilql import (
    EARLY_REWARD,
    NO_ACTION,
    NO_ACTION_LEFT,
    NO_FRONT,
    NO_GROUP,
    NO_TOKENS,
    NOT_FINITE,
)

BOS, START, EOT = 90, 91, 7


def naive(row: Trajectory, options: dict[str, Any]) -> str | dict[str, Any]:
    """The element of one row, or why it is left out; token by token."""
    tokens, count = list(row.tokens), len(row.tokens)
    if not count:
        return NO_TOKENS
    loss = list(row.loss_mask) or [0] * row.prompt_length + [1] * row.response_length
    acts = list(row.action_mask) or list(loss)
    trains = [a and b for a, b in zip(acts, loss, strict=True)]
    if options.get("end_of_turn_id") is not None:
        for t in range(count - 1, 0, -1):
            if acts[t - 1] and not acts[t] and tokens[t] == options["end_of_turn_id"]:
                acts[t], trains[t] = 1, trains[t - 1]
    if not any(acts):
        return NO_ACTION

    kept, most = list(range(count)), options.get("max_length")
    right = options.get("truncation_side", "right") == "right"
    if most is not None and count > most:
        kept = kept[:most] if right else kept[-most:]
    bos = options.get("bos_token_id") is not None and bool(acts[kept[0]])
    if bos and len(kept) == most:
        kept = kept[:-1] if right else kept[1:]
    cut_off = False
    if right and len(kept) < count:
        later = [t for t in range(len(kept), count) if acts[t]]
        cut_off = bool(later)
        sound = later[0] == len(kept) if later else row.terminated is not False
        if not sound and any(acts[t] for t in kept):
            while not acts[kept.pop()]:
                pass
            cut_off = True
    seq2seq = options.get("architecture") == "seq2seq"
    started = options.get("decoder_start_token_id") is not None
    chosen = [t for t in kept if acts[t]]
    front = [BOS] if bos else []
    starts_bare = bool(kept) and bool(acts[kept[0]]) and not bos
    everything = [t for t in range(count) if acts[t]]
    encoder: list[int] = []
    if seq2seq:
        split = kept.index(chosen[0]) if chosen else len(kept)
        encoder, kept = front + [tokens[t] for t in kept[:split]], kept[split:]
        front = [START] if started and chosen else []
        if not started and chosen:
            everything.remove(chosen[0])
            chosen = chosen[1:]
            if not everything:
                return NO_ACTION

    dense = len(row.token_rewards) > 0
    earned = dict.fromkeys(chosen, 0.0)
    early = False
    if dense:
        values = [float(x) for x in row.token_rewards]
        for t, following in zip(everything, [*everything[1:], count], strict=True):
            if t in earned:
                earned[t] = sum(values[t:following])
        early = any(x != 0 for x in values[: everything[0]])
    elif chosen and not cut_off:
        earned[chosen[-1]] = row.reward
    if not math.isfinite(sum(earned.values())):
        return NOT_FINITE
    if starts_bare:
        return NO_FRONT
    if not chosen:
        return NO_ACTION_LEFT
    if early:
        return EARLY_REWARD
    where = [kept.index(t) + len(front) - 1 for t in chosen]
    terminal = int(row.terminated is not False and not cut_off)
    body = front + [tokens[t] for t in kept]
    return {
        **({"input_ids": encoder, "decoder_input_ids": body} if seq2seq else {"input_ids": body}),
        "rewards": [earned[t] for t in chosen],
        "states_ixs": [*where, len(body) - 1],
        "actions_ixs": where,
        "dones": [1] * len(where) + [1 - terminal],
        "terminals": [0] * len(where) + [terminal],
        "action_mask": [trains[t] for t in chosen],
    }


@st.composite
def rows(draw: st.DrawFn) -> Trajectory:
    prompt, response = draw(st.integers(0, 3)), draw(st.integers(0, 6))
    size = prompt + response

    def per_token(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=size, max_size=size)) if draw(st.booleans()) else []

    rewards = st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, -2.0])
    return Trajectory(
        tokens=draw(st.lists(st.integers(1, 8), min_size=size, max_size=size)),
        prompt_length=prompt,
        response_length=response,
        loss_mask=per_token(st.integers(0, 1)),
        action_mask=per_token(st.integers(0, 1)),
        token_rewards=per_token(rewards | st.just(math.nan)) if draw(st.booleans()) else [],
        reward=draw(st.sampled_from([0.0, 1.0, -0.5, math.nan])),
        terminated=draw(st.sampled_from([True, False, None])),
    )


options = st.fixed_dictionaries(
    {"max_length": st.none() | st.integers(1, 8), "truncation_side": st.sampled_from(["left", "right"])},
    optional={"bos_token_id": st.just(BOS), "end_of_turn_id": st.just(EOT)},
)
architectures = st.sampled_from(
    [{}, {"architecture": "seq2seq"}, {"architecture": "seq2seq", "decoder_start_token_id": START}]
)


@settings(max_examples=80, deadline=None)
@given(st.lists(rows(), max_size=5), options, architectures, st.sampled_from([1, 6, 1000]))
def test_a_set_is_what_a_walk_over_the_tokens_gives(
    given_rows: list[Trajectory], chosen: dict[str, Any], architecture: dict[str, Any], block: int
) -> None:
    chosen = chosen | architecture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trajstore.offline.flat.blocks.__defaults__", (block,))
        made = ilql_dataset(TrajectoryBatch(given_rows), **chosen)
    walked = [naive(row, chosen) for row in given_rows]
    expected = [element for element in walked if not isinstance(element, str)]
    names = list(expected[0]) if expected else ["input_ids"]
    assert made.table.select(names).to_pylist() == expected
    reasons = [reason for reason in walked if isinstance(reason, str)]
    assert made.report.dropped == {reason: reasons.count(reason) for reason in set(reasons)}
    assert (
        (made.report.rows_in, made.report.rows_out)
        == (len(given_rows), len(expected))
        == (
            len(given_rows),
            len(made),
        )
    )


def row(**given: Any) -> Trajectory:
    defaults = {"prompt_tokens": [1, 2], "response_tokens": [3, 4, 5], "reward": 1.0, "terminated": True}
    return Trajectory(**{**defaults, **given})


def made(*given_rows: Trajectory, **chosen: Any) -> ILQLDataset:
    return ilql_dataset(TrajectoryBatch(given_rows), **chosen)


def test_equal_to_trlx_where_both_agree_by_definition() -> None:
    rng = np.random.default_rng(0)
    terminated = []
    for _ in range(40):
        turns = rng.integers(1, 5, size=2 * rng.integers(1, 4))
        mask = [k % 2 for k, n in enumerate(turns) for _ in range(n)]
        tokens = rng.integers(1, 50, len(mask))
        split = {"prompt_tokens": [], "response_tokens": [], "response_length": len(mask)}
        terminated.append(row(tokens=tokens, loss_mask=mask, reward=float(rng.normal()), **split))
    batch = TrajectoryBatch(terminated)
    ours, theirs = ilql_dataset(batch, scale="global"), ilql_dataset(batch, compat="trlx")
    names = ["input_ids", "states_ixs", "actions_ixs", "dones"]
    assert ours.table.select(names).to_pylist() == theirs.table.select(names).to_pylist()
    a, b = (np.concatenate(x.table.column("rewards").to_pylist()) for x in (ours, theirs))
    np.testing.assert_allclose(a, b, rtol=1e-6)
    assert ours.report.scale.mean == pytest.approx(theirs.report.scale.mean)
    assert ours.report.scale.std == pytest.approx(theirs.report.scale.std)


def test_a_row_that_was_cut_off_bootstraps_and_one_that_is_not_known_does_not() -> None:
    ends = [row(terminated=True), row(terminated=False), row(terminated=None)]
    batch = made(*ends).batch()
    assert batch.dones[:, -1].tolist() == [0, 1, 0]
    assert batch.terminals[:, -1].tolist() == [1, 0, 1]
    assert batch.rewards[:, -1].tolist() == [1, 1, 1]
    assert made(*ends).report.termination_unknown == 1


def test_an_action_without_loss_stays_a_step() -> None:
    (element,) = made(row(action_mask=[0, 0, 1, 1, 1], loss_mask=[0, 0, 1, 0, 1]))
    assert element.actions_ixs.tolist() == [1, 2, 3]
    assert element.action_mask.tolist() == [1, 0, 1]


def test_token_rewards_replace_the_reward_and_belong_to_the_action_before_them() -> None:
    (element,) = made(row(tokens=[1, 2, 3, 4, 5], action_mask=[0, 1, 0, 0, 1], loss_mask=[0, 1, 0, 0, 1],
                          token_rewards=[0, 0.5, 0, 0.25, 2]))  # fmt: skip
    assert element.rewards.tolist() == [0.75, 2]
    (element,) = made(row(token_rewards=[0, 0, 1, 1, 1]), returns=[4.0])
    assert element.rewards.tolist() == [0, 0, 4]


def test_scaling_by_the_whole_set_and_by_group() -> None:
    rewards = {"a": [0.1] * 3, "b": [0.0, 1.0], "c": [5.0]}
    given_rows = [row(group_id=g, reward=r) for g, values in rewards.items() for r in values]
    last = made(*given_rows, scale="group").batch().rewards[:, -1]
    half = math.sqrt(0.5)
    torch.testing.assert_close(last, torch.tensor([0.0, 0, 0, -half, half, 0]))
    by_group = made(*given_rows, scale="group").table
    assert by_group.column("return_mean").to_pylist() == pytest.approx([0.1] * 3 + [0.5] * 2 + [5.0])
    assert by_group.column("return_std").to_pylist() == pytest.approx([0.0] * 3 + [half] * 2 + [0.0])
    whole = np.array([r for values in rewards.values() for r in values])
    scale = made(*given_rows, scale="global").report.scale
    assert (scale.mean, scale.std) == pytest.approx((whole.mean(), whole.std(ddof=1)))
    assert made(row(), scale="group").report.dropped == {NO_GROUP: 1}


def test_the_mean_is_paid_at_the_end_and_a_bootstrapping_row_gets_it_through_v() -> None:
    given_rows = [row(reward=0.0), row(reward=2.0), row(reward=2.0, terminated=False)]
    rewards = made(*given_rows, scale="global").batch().rewards
    torch.testing.assert_close(rewards[:, -1], torch.tensor([-1.0, 1.0, 2.0]) / math.sqrt(2))
    dense = [row(token_rewards=[0, 0, 1, 0, 1]), row(token_rewards=[0, 0, 0, 0, 0])]
    rewards = made(*dense, scale="global").batch().rewards
    torch.testing.assert_close(rewards, torch.tensor([[1.0, 0, 0], [0, 0, -1]]) / math.sqrt(2))


@pytest.mark.parametrize("value", [0.1, 1e8 + 0.1, 0.0])
@pytest.mark.parametrize("count", [1, 2, 6, 7])
@pytest.mark.parametrize("scale", ["global", "group"])
def test_equal_returns_become_zero_not_noise(value: float, count: int, scale: Any) -> None:
    equal = made(*[row(reward=value, group_id="g")] * count, scale=scale)
    assert equal.batch().rewards.abs().max() == 0


@pytest.mark.parametrize("scale", ["global", "group"])
def test_returns_that_differ_by_rounding_are_equal(scale: Any) -> None:
    """0.1 + 0.2 is 0.30000000000000004; over a deviation of 3e-17 the rewards would be near 1."""
    equal = made(*[row(reward=value, group_id="g") for value in (0.1 + 0.2, 0.3, 0.3)], scale=scale)
    assert equal.batch().rewards.abs().max() == 0
    apart = made(*[row(reward=value, group_id="g") for value in (0.3 + 1e-9, 0.3, 0.3)], scale=scale)
    assert apart.batch().rewards.abs().max() > 1


def test_a_set_survives_parquet_with_its_provenance(tmp_path: Any) -> None:
    first = made(row(), row(terminated=False), scale="global", pad_token_id=9)
    pq.write_table(first.table, tmp_path / "set.parquet")
    again = ILQLDataset(pq.read_table(tmp_path / "set.parquet"))
    assert again.report == first.report
    assert again.table.equals(first.table)
    assert (again.batch().input_ids == first.batch().input_ids).all()
    with pytest.raises(SchemaError, match="not an ILQL set"):
        ILQLDataset(pa.table({"x": [1]}))


def test_batches_of_an_epoch_hold_every_row_once() -> None:
    data = made(*[row(id=f"r{i}", response_tokens=[i + 1] * (1 + i % 3)) for i in range(10)])
    epochs = [[b.input_ids[:, 2].tolist() for b in data.batches(4, seed=3, epoch=e)] for e in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    for epoch in epochs:
        assert [len(b) for b in epoch] == [4, 4, 2]
        assert sorted(i for b in epoch for i in b) == list(range(1, 11))
    assert len(list(data.batches(4, drop_last=True))) == 2
    assert [b.input_ids[0, 2] for b in data.batches(1, shuffle=False)] == list(range(1, 11))


def test_padding() -> None:
    data = made(
        row(), row(prompt_tokens=[1, 2, 3, 4], terminated=False), row(response_tokens=[8]), pad_token_id=6
    )
    batch = data.batch()
    assert isinstance(batch, ILQLBatch)
    assert isinstance(data[-1], ILQLElement)
    assert batch.input_ids[2].tolist() == [1, 2, 8, 6, 6, 6, 6]
    assert batch.attention_mask[2].tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert batch.dones[2].tolist() == [1, 0, 0, 0]
    assert batch.terminals[2].tolist() == [0, 1, 1, 1]
    assert batch.action_mask[2].tolist() == [1, 0, 0]
    with pytest.raises(IndexError):
        data[3]


def test_a_stored_attention_mask_is_kept() -> None:
    (element,) = made(row(attention_mask=[0, 1, 1, 1, 1]), max_length=4)
    assert element.attention_mask.tolist() == [0, 1, 1, 1]
    (element,) = made(
        row(attention_mask=[0, 1, 1, 1, 1]), max_length=3, truncation_side="left", bos_token_id=9
    )
    assert element.attention_mask.tolist() == [1, 1, 1]


def test_an_empty_set_has_columns_and_shapes() -> None:
    data = made(row(response_tokens=[]))
    assert data.report.dropped == {NO_ACTION: 1}
    assert data.batch().states_ixs.shape == (0, 0)
    assert list(data.batches(4)) == []
    assert made(row(response_tokens=[]), architecture="seq2seq").batch().decoder_input_ids.shape == (0, 0)
    as_trlx = made(compat="trlx")
    assert (len(as_trlx), as_trlx.batch().action_mask, as_trlx.num_actions) == (0, None, 0)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"compat": "verl"}, "compat is 'verl', expected one of None, trlx"),
        ({"architecture": "rnn"}, "architecture is 'rnn'"),
        ({"truncation_side": "middle"}, "truncation_side is 'middle'"),
        ({"scale": "batch"}, "scale is 'batch'"),
        ({"max_length": 0}, "max_length is 0"),
        ({"compat": "trlx", "scale": "global"}, "scale does not go with"),
        ({"compat": "trlx", "pad_token_id": 3}, "pad_token_id does not go with"),
        ({"decoder_start_token_id": 3}, "goes with architecture"),
    ],
)
def test_options_that_do_not_fit_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(row(), **chosen)


def test_rows_that_cannot_be_masked_are_named() -> None:
    rows_ = [row(), row(id="x", tokens=[1, 2], prompt_tokens=[], response_tokens=[])]
    with pytest.raises(ValidationError, match=r"trajectory 1 \(id 'x'\), column 'loss_mask': neither"):
        made(*rows_)
    with pytest.raises(LengthMismatchError, match="returns has length 3, the rows are 1"):
        made(row(), returns=[1, 2, 3])


def test_the_loader_takes_a_set_as_it_is() -> None:
    data = made(*[row(id=f"r{i}", response_tokens=[i + 1] * (1 + i % 3)) for i in range(6)])
    loaded = [data.as_batch(batch) for batch in TrajectoryLoader(data, batch_size=4)]
    expected = list(data.batches(4, shuffle=False))
    assert len(loaded) == len(expected) == 2
    for found, wanted in zip(loaded, expected, strict=True):
        for name, tensor in vars(wanted).items():
            assert torch.equal(getattr(found, name), tensor), name


def test_rows_that_are_not_finished_are_left_out() -> None:
    """Partial rollouts: the continuation is a row of its own, which holds all of it."""
    split = {"prompt_tokens": [1], "response_tokens": [2, 3]}
    rows = [Trajectory(id=status.value, status=status, **split) for status in TrajectoryStatus]
    data = ilql_dataset(TrajectoryBatch(rows))
    assert data.table["id"].to_pylist() == ["pending", "completed"]
    assert data.report.dropped == {"not finished: aborted, failed or still generating": 3}
    assert len(ilql_dataset(TrajectoryBatch(rows), compat="trlx")) == 5, "trlX knows no status"
