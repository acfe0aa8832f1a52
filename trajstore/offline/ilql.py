"""Owns the ILQL builder: stored rows → states, actions, rewards and ends in Arrow columns; knows no model.

Mask → flatnonzero → offsets, block by block: no Python per token. research/ilql.md has trlX's behaviour,
which `compat="trlx"` (trajstore.offline.trlx) reproduces; here is the sound one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import InputError, LengthMismatchError
from trajstore.offline import flat, scaling, trlx, windows
from trajstore.offline.flat import ArrowSource, Bools, Float64s, Int64s, Masks
from trajstore.offline.ilql_set import ILQLDataset, Part, Report, assemble
from trajstore.offline.scaling import ReturnScale, Scaled, Scaling
from trajstore.offline.windows import Side, Windows

Architecture = Literal["causal", "seq2seq"]

NEEDED = ("id", "id_hash", "length", "tokens", "reward")
OPTIONAL = (
    "group_id",
    "prompt_length",
    "loss_mask",
    "action_mask",
    "attention_mask",
    "token_rewards",
    "terminated",
    "status",
)

NO_TOKENS = "no tokens"
NO_ACTION = "no action"
NO_ACTION_LEFT = "no action left after truncation"
NO_FRONT = "starts with an action, and bos_token_id is not given"
NOT_FINITE = "reward is not finite"
EARLY_REWARD = "reward before the first action"
NO_GROUP = "no group_id to scale by"
REASONS = (
    flat.UNFINISHED,
    NO_TOKENS,
    NO_ACTION,
    NOT_FINITE,
    NO_FRONT,
    NO_ACTION_LEFT,
    EARLY_REWARD,
    NO_GROUP,
)
"""Why a row is left out; the first that applies is counted."""


@dataclass(frozen=True)
class Options:
    """How rows become elements; see `ilql_dataset`."""

    architecture: Architecture
    max_length: int | None
    truncation_side: Side
    bos_token_id: int | None
    decoder_start_token_id: int | None
    end_of_turn_id: int | None
    scale: Scaling


def ilql_dataset(
    source: ArrowSource | pa.Table,
    *,
    compat: Literal["trlx"] | None = None,
    architecture: Architecture = "causal",
    max_length: int | None = None,
    truncation_side: Side = "right",
    bos_token_id: int | None = None,
    pad_token_id: int = 0,
    decoder_start_token_id: int | None = None,
    end_of_turn_id: int | None = None,
    scale: Scaling = "none",
    returns: Sequence[float] | NDArray[Any] | None = None,
) -> ILQLDataset:
    """ILQL data from stored trajectories; single-turn and multi-turn alike, from their masks.

    An action is a token that the policy sampled (`action_mask`, else `loss_mask`); tokens between two turns
    are the environment's, and the next state is then read at the last token before the next action. An
    action with a loss mask of 0 stays a step of the episode and is masked from the loss. `token_rewards`,
    when a row has them, are the rewards: what arrives between two actions belongs to the first of them, so
    rewards per turn need no other form. Else `reward` is received for the last action. A row bootstraps from
    its last state where `terminated` is false, and where truncation took its end (and with it the reward);
    it ends where `terminated` is true or, since nothing is bootstrapped silently, not known. Rows that were
    aborted, failed or are still generating are left out: their reward is not yet one, and the continuation of
    a partial rollout is a row of its own that holds all of it.

    Args:
        source: a Scan, a TrajectoryBatch, or a table of stored rows.
        compat: "trlx" gives what trlX's `make_experience` gives, quirks included: `loss_mask` runs are the
            outputs, the scalar reward is normalised over the set and lies on the last action also of a row
            that was cut off, every row ends, padding is 0; what crashes trlX is a ValidationError.
        architecture: "seq2seq" gives the tokens before the first action to the encoder, the rest to the
            decoder.
        max_length: most tokens of a row (encoder and decoder together); None = no limit.
        truncation_side: the side that is cut off.
        bos_token_id: put in front of a row that starts with an action; without it such a row is left out.
        pad_token_id: what `input_ids` holds on padding.
        decoder_start_token_id: put in front of the decoder's tokens. Without it nothing predicts the first
            of them, so it is no action (trlX's way).
        end_of_turn_id: a token of this id right after a sampled one is an action too.
        scale: "global" takes off the mean of the complete returns and divides by their deviation, "group"
            does so within each `group_id`, "none" leaves the rewards alone.
        returns: [N] in place of the rows' `reward`; they also replace `token_rewards`.

    Returns:
        The set; its `report` counts the rows that were left out, by reason, and holds the statistics.

    Raises:
        InputError: an option is unknown, or does not go with `compat="trlx"`.
        LengthMismatchError: `returns` is not as long as the rows (trlX lets it be shorter).
        ValidationError: a row has neither loss_mask nor a known split; a row that crashes trlX.
    """
    options = Options(
        architecture, max_length, truncation_side, bos_token_id, decoder_start_token_id, end_of_turn_id, scale
    )
    _check(options, compat, pad_token_id)
    table = flat.read(source, NEEDED, OPTIONAL)
    given = None if returns is None else np.asarray(returns, np.float64)
    provenance = {
        "source": "table" if isinstance(source, pa.Table) else repr(source),
        "snapshot": getattr(source, "snapshot", None),
        "compat": compat,
        "architecture": architecture,
    }
    if compat == "trlx":
        parts, scaled = trlx.parts(
            table, given, architecture, max_length=max_length, side=truncation_side, bos=bos_token_id
        )
        report = Report(len(table), len(table), {}, 0, 0, scaled)
        return assemble(parts, report, provenance, pad_token_id)
    if given is not None and len(given) != len(table):
        raise LengthMismatchError(f"returns has length {len(given)}, the rows are {len(table)}")
    return _sound(table, given, options, provenance, pad_token_id)


def _check(options: Options, compat: str | None, pad_token_id: int) -> None:
    for name, value, known in (
        ("compat", compat, (None, "trlx")),
        ("architecture", options.architecture, get_args(Architecture)),
        ("truncation_side", options.truncation_side, get_args(Side)),
        ("scale", options.scale, get_args(Scaling)),
    ):
        if value not in known:
            raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(str, known))}")
    if options.max_length is not None and options.max_length < 1:
        raise InputError(f"max_length is {options.max_length}, expected at least 1")
    if compat == "trlx":
        ours = {
            "end_of_turn_id": options.end_of_turn_id is not None,
            "decoder_start_token_id": options.decoder_start_token_id is not None,
            "scale": options.scale != "none",
            "pad_token_id": pad_token_id != 0,
        }
        for name in (name for name, is_given in ours.items() if is_given):
            raise InputError(f'{name} does not go with compat="trlx", which has a rule of its own for it')
    if options.decoder_start_token_id is not None and options.architecture == "causal":
        raise InputError('decoder_start_token_id goes with architecture="seq2seq" only')


def _sound(
    table: pa.Table, given: Float64s | None, options: Options, provenance: dict[str, Any], pad_token_id: int
) -> ILQLDataset:
    groups = _group_codes(table)
    parts: list[Part] = []
    dropped: Counter[str] = Counter()
    truncated = unknown = 0
    seen = 0
    for batch in flat.blocks(table):
        rows = slice(seen, seen + len(batch))
        block = _block(batch, seen, None if given is None else given[rows], groups[rows], options)
        seen += len(batch)
        dropped.update(block.dropped)
        truncated += block.truncated
        unknown += block.unknown
        if len(block.part.counts):
            parts.append(block.part)
    scaled = _scaled(parts, options.scale)
    report = Report(
        len(table), sum(len(part.counts) for part in parts), dict(dropped), truncated, unknown, scaled
    )
    return assemble(parts, report, provenance, pad_token_id)


def _group_codes(table: pa.Table) -> Int64s:
    """[N] a number for each group, -1 where there is none."""
    if "group_id" not in table.schema.names:
        return np.full(len(table), -1, np.int64)
    codes = table.column("group_id").combine_chunks().dictionary_encode().indices
    return codes.fill_null(-1).to_numpy().astype(np.int64)  # type: ignore[no-any-return]  # pyarrow is untyped


@dataclass(frozen=True)
class _Block:
    part: Part
    dropped: Counter[str]
    truncated: int
    unknown: int


def _block(
    batch: pa.RecordBatch, first_row: int, given: Float64s | None, groups: Int64s, options: Options
) -> _Block:
    tokens, offsets = flat.offsets_of(batch)
    masks = flat.masks(batch, offsets, first_row)
    if options.end_of_turn_id is not None:
        masks = _with_ends_of_turns(masks, tokens, offsets, options.end_of_turn_id)
    at = np.flatnonzero(masks.actions)
    terminated = flat.flags(batch, "terminated")
    terminal = terminated != 0

    bos = options.bos_token_id
    kept = windows.cut(
        masks.actions, offsets, options.max_length, options.truncation_side, prefix=bos is not None
    )
    if options.max_length is not None and options.truncation_side == "right":
        kept = windows.end_in_decisions(kept, at, offsets, terminal)
    first, encoder, decoder = _split(at, kept, options)
    if first is not None:  # nothing predicts the first token of a decoder without a start token
        still = np.ones(len(at), np.bool_)
        still[first] = False
        at = at[still]
    placed = windows.index(at, decoder)

    reward = batch.column("reward").to_numpy() if given is None else given
    dense = flat.present(batch, "token_rewards") & (given is None)
    earned = _rewards(batch, at, offsets, decoder.start, placed, reward, dense, kept.cut_off)

    count_all = np.diff(np.searchsorted(at, offsets))
    started = np.zeros(len(batch), np.bool_)
    filled = kept.end > kept.start
    started[filled] = masks.actions[kept.start[filled]] & ~kept.prefixed[filled]
    # A decoder of its own has the encoder before it, which then is empty: that is as bad.
    faults = {
        flat.UNFINISHED: flat.unfinished(batch),
        NO_TOKENS: offsets[1:] == offsets[:-1],
        NO_ACTION: count_all == 0,
        NOT_FINITE: ~np.isfinite(earned.total),
        NO_FRONT: started,
        NO_ACTION_LEFT: placed.counts == 0,
        EARLY_REWARD: earned.early,
        NO_GROUP: groups < 0 if options.scale == "group" else np.zeros(len(batch), np.bool_),
    }
    dropped: Counter[str] = Counter()
    keep = np.ones(len(batch), np.bool_)
    for reason in REASONS:
        hit = keep & faults[reason]
        dropped[reason] = int(hit.sum())
        keep &= ~hit
    if not keep.all():  # seldom: the block is done again without them
        rest = batch.filter(pa.array(keep))
        again = _block(rest, first_row, None if given is None else given[keep], groups[keep], options)
        return replace(again, dropped=+dropped)
    part = Part(
        batch=batch,
        inputs=windows.column(tokens, offsets, encoder, bos or 0),
        attention=None,
        decoder=None,
        counts=placed.counts,
        rewards=earned.rewards,
        actions=placed.actions,
        states=placed.states,
        terminal=terminal & ~kept.cut_off,
        action_mask=_trained(masks, at, placed),
        last_reward=earned.last,
        total=earned.total,
        dense=dense,
        groups=groups,
    )
    if options.architecture == "seq2seq":
        part.decoder = windows.column(tokens, offsets, decoder, options.decoder_start_token_id or 0)
    if flat.present(batch, "attention_mask").any():
        given_mask = flat.token_column(batch, "attention_mask", offsets, np.ones(len(tokens), np.int8))
        part.attention = windows.column(given_mask, offsets, encoder, 1)
    truncated = kept.end - kept.start < np.diff(offsets)
    unknown = (terminated < 0) & ~kept.cut_off
    return _Block(part, Counter(), int(truncated.sum()), int(unknown.sum()))


def _with_ends_of_turns(masks: Masks, tokens: NDArray[Any], offsets: Int64s, end_of_turn: int) -> Masks:
    def after(mask: Bools) -> Bools:
        out = np.zeros(len(mask), np.bool_)
        out[1:] = mask[:-1]
        out[offsets[:-1][np.diff(offsets) > 0]] = False
        return out

    ends = (tokens == end_of_turn) & ~masks.actions & after(masks.actions)
    return Masks(masks.actions | ends, masks.trained | (ends & after(masks.trained)))


def _split(at: Int64s, kept: Windows, options: Options) -> tuple[Int64s | None, Windows, Windows]:
    """Actions that nothing predicts (or None), the encoder's window, and the one that actions count in."""
    if options.architecture == "causal":
        return None, kept, kept
    lo, hi = np.searchsorted(at, kept.start), np.searchsorted(at, kept.end)
    has = hi > lo
    split = kept.end.copy()
    split[has] = at[lo[has]]
    no = np.zeros(len(has), np.bool_)
    started = options.decoder_start_token_id is not None
    decoder = Windows(split, kept.end, has if started else no, kept.cut_off)
    return None if started else lo[has], Windows(kept.start, split, kept.prefixed, no), decoder


@dataclass(frozen=True)
class _Earned:
    rewards: NDArray[np.float32]  # [A]
    last: Float64s  # [B] reward of the last action, 0 without one
    total: Float64s  # [B] return of the kept actions
    early: Bools  # [B] a reward that no action earned


def _rewards(
    batch: pa.RecordBatch,
    at: Int64s,
    offsets: Int64s,
    first: Int64s,
    placed: windows.Index,
    reward: Float64s,
    dense: Bools,
    cut_off: Bools,
) -> _Earned:
    counts = placed.counts
    rewards = np.zeros(int(counts.sum()), np.float32)
    some = counts > 0
    last = np.where(some & ~cut_off, reward, 0.0)
    total = last.copy()
    early = np.zeros(len(counts), np.bool_)
    if dense.any():
        values = flat.token_column(batch, "token_rewards", offsets, np.zeros(int(offsets[-1]), np.float32))
        earned, any_before = _per_action(values, at, offsets)
        earned = earned if placed.chosen is None else earned[placed.chosen]
        rewards[:] = earned
        early = dense & any_before
        ends = np.cumsum(counts)
        sums = np.zeros(len(counts))
        sums[some] = np.add.reduceat(earned, (ends - counts)[some]) if some.any() else 0
        total[dense] = sums[dense]
        last[dense] = 0
        last[dense & some] = earned[ends[dense & some] - 1]
    rewards[windows.last_of(counts)[some]] = last[some]
    return _Earned(rewards, last, total, early)


def _per_action(values: NDArray[Any], at: Int64s, offsets: Int64s) -> tuple[Float64s, Bools]:
    """What each action earned until the next one, [A]; whether anything came before the first one, [B]."""
    is_edge = np.zeros(int(offsets[-1]), np.bool_)
    is_edge[at] = True
    is_edge[offsets[:-1][np.diff(offsets) > 0]] = True
    edges = np.flatnonzero(is_edge)
    sums = np.add.reduceat(values, edges, dtype=np.float64) if len(edges) else np.zeros(0)
    is_action = np.zeros(len(edges), np.bool_)
    is_action[np.searchsorted(edges, at)] = True
    any_before = np.zeros(len(offsets) - 1, np.bool_)
    if not is_action.all():
        some = np.logical_or.reduceat(values != 0, edges)[~is_action]  # NaN is no zero either
        any_before[np.searchsorted(offsets, edges[~is_action], "right") - 1] = some
    return sums[is_action], any_before


def _trained(masks: Masks, at: Int64s, placed: windows.Index) -> NDArray[np.int8]:
    if masks.trained is masks.actions:
        return np.ones(len(placed.actions), np.int8)
    at = at if placed.chosen is None else at[placed.chosen]
    return masks.trained[at].view(np.int8)


def _scaled(parts: list[Part], scale: Scaling) -> ReturnScale:
    """Scales the rewards of all parts in place and notes each row's statistics."""
    if not parts or scale == "none":
        return ReturnScale(scale)
    total = np.concatenate([part.total for part in parts])
    complete = np.concatenate([part.terminal for part in parts])
    by = scaling.statistics(scale, total, complete, np.concatenate([part.groups for part in parts]))
    seen = 0
    for part in parts:
        rows = slice(seen, seen + len(part.counts))
        seen += len(part.counts)
        part.rewards = scaling.apply(
            part.rewards,
            part.last_reward,
            part.counts,
            part.terminal,
            part.dense,
            Scaled(by.mean[rows], by.std[rows], by.scale),
        )
        part.statistics = (by.mean[rows], by.std[rows])
    return by.scale
