"""Owns other forms of an ILQL set and the way back: LMRL-Gym/JAXSeq rows, flat transitions by turn; no model.

Nothing is lost: `from_jaxseq(to_jaxseq(d))` and `from_transitions(to_transitions(d))` have d's rows.

Axis letters: B rows, A actions of all of them, T tokens of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import InputError
from trajstore.offline import flat
from trajstore.offline.flat import Bools, Int64s
from trajstore.offline.gae import gae
from trajstore.offline.ilql_set import METADATA_KEY, ILQLDataset, Part
from trajstore.offline.windows import last_of

_SCALARS = ("id", "id_hash", "group_id", "return_mean", "return_std")


@dataclass(frozen=True)
class _Steps:
    """The rows of a set as flat arrays: [B], [B + 1] offsets of tokens, [A] actions with their rewards."""

    tokens: NDArray[Any]
    offsets: Int64s
    counts: Int64s
    at: Int64s
    rewards: NDArray[np.float32]
    trained: NDArray[np.int8]
    ended: Bools

    @staticmethod
    def of(batch: pa.RecordBatch) -> _Steps:
        tokens, lengths = _flat(batch, "input_ids")
        at, counts = _flat(batch, "actions_ixs")
        goes_on, states = _flat(batch, "dones")
        if (at < 0).any():
            raise InputError("an action is at -1, where nothing predicts it", hint="pass bos_token_id=")
        trained = np.ones(len(at), np.int8)
        if "action_mask" in batch.schema.names:
            trained = _flat(batch, "action_mask")[0]
        rewards = _flat(batch, "rewards")[0]
        ended = goes_on[last_of(states)] == 0
        return _Steps(tokens, _offsets(lengths), counts, at.astype(np.int64), rewards, trained, ended)

    def columns(self, batch: pa.RecordBatch, input_ids: pa.Array) -> dict[str, pa.Array]:
        """The columns of a set again."""
        states = np.insert(self.at, np.cumsum(self.counts), np.diff(self.offsets) - 1).astype(np.int32)
        no = np.zeros(len(self.counts), np.float64)
        part = Part(
            batch=batch,
            inputs=input_ids,
            attention=batch.column("attention_mask") if "attention_mask" in batch.schema.names else None,
            decoder=None,
            counts=self.counts,
            rewards=self.rewards,
            actions=self.at.astype(np.int32),
            states=states,
            terminal=self.ended,
            action_mask=self.trained,
            last_reward=no,
            total=no,
            dense=no > 0,
            groups=np.zeros(len(no), np.int64),
        )
        return part.columns()


def to_jaxseq(data: ILQLDataset) -> pa.Table:
    """ILQLData of LMRL-Gym/JAXSeq, a row a trajectory.

    Index i of a per-token list is about the token that position i predicts, so they have T - 1 values.

    Returns:
        `input_ids`; `should_take_action`, `rewards` and (ours: what the loss counts) `action_mask`; `done`,
        the episode ended; `next_token_ids` and `next_done`, null: no row goes on in another one, so where
        `done` is false the value to bootstrap from is the one at the row's last token.

    Raises:
        InputError: the set is an encoder-decoder's, or has an action that nothing predicts.
    """
    _refuse_seq2seq(data)
    out = []
    for batch in _batches(data.table):
        steps = _Steps.of(batch)
        lengths = np.diff(steps.offsets) - 1
        at = steps.at + np.repeat(np.cumsum(lengths) - lengths, steps.counts)

        def per_token(values: Any, kind: Any, at: Int64s = at, lengths: Int64s = lengths) -> pa.ListArray:
            whole = np.zeros(int(lengths.sum()), kind)
            whole[at] = values
            return flat.lists(whole, lengths)

        columns = _kept(batch, (*_SCALARS, "input_ids", "attention_mask")) | {
            "should_take_action": per_token(1, np.int8),
            "rewards": per_token(steps.rewards, np.float32),
            "action_mask": per_token(steps.trained, np.int8),
            "done": pa.array(steps.ended),
            "next_token_ids": pa.nulls(len(batch), batch.column("input_ids").type),
            "next_done": pa.nulls(len(batch), pa.bool_()),
        }
        out.append(pa.table(columns))
    return pa.concat_tables(out).replace_schema_metadata(data.table.schema.metadata)


def from_jaxseq(table: pa.Table) -> ILQLDataset:
    """The inverse of `to_jaxseq`; other rows of that form need its metadata and `id`, `id_hash`."""
    out = []
    for batch in _batches(table):
        taken, lengths = _flat(batch, "should_take_action")
        starts = np.cumsum(lengths) - lengths
        at = np.flatnonzero(taken)
        counts = np.diff(np.searchsorted(at, _offsets(lengths)))
        rewards, trained = _flat(batch, "rewards")[0][at], _flat(batch, "action_mask")[0][at]
        tokens, sizes = _flat(batch, "input_ids")
        local = at - np.repeat(starts, counts)
        ended = np.asarray(batch.column("done"))
        steps = _Steps(tokens, _offsets(sizes), counts, local, rewards, trained, ended)
        out.append((batch, steps.columns(batch, batch.column("input_ids"))))
    return _dataset(out, table)


def to_transitions(data: ILQLDataset, *, gamma: float = 1.0) -> pa.Table:
    """One row a turn: what the policy saw, what it said, what came of it (the form of ArCHer and DigiRL).

    A turn is a run of actions without a token of the environment between them.

    Args:
        gamma: discount of one turn in `mc_return`.

    Returns:
        `id`, `turn` (from 0); `observation`, the tokens before the turn; `action`, its tokens, with `rewards`
        and `action_mask` for each; `reward`, their sum; `next_observation`, the tokens before the next turn,
        or all tokens of the row; `done`, the episode ended here; `trajectory_reward`, the sum over the row;
        `mc_return`, the discounted sum from this turn on (without a bootstrap).

    Raises:
        InputError: the set is an encoder-decoder's, has an action that nothing predicts, or attention masks.
    """
    _refuse_seq2seq(data)
    if "attention_mask" in data.table.schema.names:
        raise InputError("the rows have attention masks, which transitions have no place for")
    out = []
    for batch in _batches(data.table):
        steps = _Steps.of(batch)
        action_row = np.repeat(np.arange(len(batch)), steps.counts)
        is_first = np.ones(len(steps.at), np.bool_)
        is_first[1:] = (np.diff(steps.at) != 1) | (np.diff(action_row) != 0)
        first = np.flatnonzero(is_first)
        size = np.diff(np.append(first, len(steps.at)))
        row = action_row[first]
        turns = np.bincount(row, minlength=len(batch))
        ends = np.cumsum(turns)
        seen = steps.at[first] + 1
        following = np.zeros(len(seen), np.int64)
        following[:-1] = seen[1:]
        following[ends - 1] = np.diff(steps.offsets)
        start = steps.offsets[:-1][row]
        reward = np.add.reduceat(steps.rewards, first, dtype=np.float64)
        total = np.bincount(row, reward, len(batch))
        no = np.zeros(len(batch))
        mc_return, _ = gae(reward, np.zeros(len(row)), _offsets(turns), no, gamma=gamma, lam=1.0)
        done = np.zeros(len(row), np.bool_)
        done[ends - 1] = steps.ended

        def tokens(begin: Int64s, length: Int64s, steps: _Steps = steps) -> pa.ListArray:
            return flat.lists(steps.tokens[flat.ranges(begin, length)], length)

        columns = {name: column.take(pa.array(row)) for name, column in _kept(batch, _SCALARS).items()} | {
            "turn": (np.arange(len(row)) - (ends - turns)[row]).astype(np.int32),
            "observation": tokens(start, seen),
            "action": tokens(start + seen, size),
            "rewards": flat.lists(steps.rewards, size),
            "action_mask": flat.lists(steps.trained, size),
            "reward": reward,
            "next_observation": tokens(start, following),
            "done": done,
            "trajectory_reward": total[row],
            "mc_return": mc_return,
        }
        out.append(pa.table(columns))
    return pa.concat_tables(out).replace_schema_metadata(data.table.schema.metadata)


def from_transitions(table: pa.Table) -> ILQLDataset:
    """The inverse of `to_transitions`: the turns of a row stand together, in order."""
    out = []
    for batch in _batches(table.combine_chunks()):
        starts = np.flatnonzero(batch.column("turn").to_numpy() == 0)
        ends = np.append(starts[1:], len(batch))[: len(starts)]
        _, seen = _flat(batch, "observation")
        _, size = _flat(batch, "action")
        rewards, trained = _flat(batch, "rewards")[0], _flat(batch, "action_mask")[0]
        rows = batch.take(pa.array(ends - 1))
        input_ids = rows.column("next_observation")
        lengths = np.diff(input_ids.offsets.to_numpy()).astype(np.int64)
        steps = _Steps(
            input_ids.flatten().to_numpy(),
            _offsets(lengths),
            np.add.reduceat(size, starts),
            flat.ranges(seen - 1, size),
            rewards,
            trained,
            np.asarray(rows.column("done")),
        )
        out.append((rows, steps.columns(rows, input_ids)))
    return _dataset(out, table)


def _dataset(parts: Sequence[tuple[pa.RecordBatch, dict[str, pa.Array]]], table: pa.Table) -> ILQLDataset:
    said = table.schema.metadata
    made = [pa.table(columns | _kept(batch, _SCALARS[3:])) for batch, columns in parts]
    whole = pa.concat_tables(made)
    if said and b'"compat": "trlx"' in said[METADATA_KEY]:  # it knows neither
        whole = whole.drop_columns(["terminals", "action_mask"])
    return ILQLDataset(whole.replace_schema_metadata(said))


def _batches(table: pa.Table) -> list[pa.RecordBatch]:
    """The rows, and one empty batch when there are none, so that columns survive."""
    empty = pa.RecordBatch.from_pylist([], table.schema)
    return [batch for batch in table.to_batches() if len(batch)] or [empty]


def _refuse_seq2seq(data: ILQLDataset) -> None:
    if data.is_seq2seq:
        raise InputError("this form is a causal one", hint='build the set with architecture="causal"')


def _kept(batch: pa.RecordBatch, names: Sequence[str]) -> dict[str, pa.Array]:
    return {name: batch.column(name) for name in names if name in batch.schema.names}


def _flat(batch: pa.RecordBatch, name: str) -> tuple[NDArray[Any], Int64s]:
    column = batch.column(name)
    return column.flatten().to_numpy(), np.diff(column.offsets.to_numpy()).astype(np.int64)


def _offsets(lengths: Int64s) -> Int64s:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
