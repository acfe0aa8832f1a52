"""Owns PPO data: stored rows ⇄ PPO elements, their batches, and advantages for stored rows; knows no trainer.

Axis letters: B rows, Q and R tokens of query and response, T tokens of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore import layouts
from trajstore.errors import InputError, ValidationError
from trajstore.layouts import Lists, Options, Ragged
from trajstore.offline import flat
from trajstore.offline.elements import PPORLBatch, PPORLElement
from trajstore.offline.flat import ArrowSource, Int64s
from trajstore.offline.gae import gae
from trajstore.offline.ppo_columns import (
    LogProbs,
    any_token,
    log_probs_of,
    penalties_of,
    refuse,
    rewards_of,
    values_of,
)
from trajstore.trajectory import Trajectory, TrajectoryStatus

if TYPE_CHECKING:
    from torch import Tensor

NotFinite = Literal["error", "mask"]
Side = Literal["left", "right"]

NEEDED = ("id", "id_hash", "length", "prompt_length", "tokens", "reward")
OPTIONAL = (
    "loss_mask",
    "action_mask",
    "log_probs",
    "behavior_log_probs",
    "values",
    "token_rewards",
    "status",
)

NOTHING_TRAINED = "nothing in it is trained on"

_ENDS = ("terminated", "bootstrap_value")

_TENSORS = ("query_tensors", "response_tensors", "logprobs", "values", "rewards", "response_masks")
_FIELDS = ("query_tensor", "response_tensor", "logprobs", "values", "rewards", "response_mask")


@dataclass(frozen=True)
class PPODataset:
    """PPO elements in flat arrays.

    Attributes:
        lists: the rows; columns are the fields of PPORLBatch, `response_masks` only if a token is masked.
        dropped: rows left out, by reason.
        zero_log_probs: trained tokens whose log-prob is exactly 0.0, which an engine hardly ever gives.
    """

    lists: Lists
    dropped: dict[str, int]
    zero_log_probs: int

    def __len__(self) -> int:
        return len(self.lists)

    def __getitem__(self, i: int) -> PPORLElement:
        """One element, of tensors of its own.

        Raises:
            IndexError: there is no such row.
        """
        row = self.lists.take(np.array([range(len(self))[i]]))
        fields = {name: column[0] for name, column in _padded(row, 0, "right").items()}
        return PPORLElement(**{_FIELDS[_TENSORS.index(name)]: value for name, value in fields.items()})

    def batch(
        self, rows: Sequence[int] | Int64s | None = None, *, pad_token_id: int, padding_side: Side = "left"
    ) -> PPORLBatch:
        """These rows (all by default); see `collate`."""
        chosen = np.arange(len(self)) if rows is None else np.asarray(rows, np.int64)
        return PPORLBatch(**_padded(self.lists.take(chosen), pad_token_id, padding_side))

    def rows(self, columns: Sequence[str] = ()) -> Lists:
        """The row source that loaders take."""
        return self.lists


def ppo_dataset(
    source: ArrowSource | pa.Table,
    *,
    log_probs: LogProbs = "trainer",
    reference: str | None = None,
    kl_coefficient: float = 0.0,
    not_finite: NotFinite = "error",
) -> PPODataset:
    """PPO elements from stored rows: queries are prompts, responses what follows them.

    Rewards are `token_rewards`, else `reward` at the last trained token; with a reference the KL penalty is
    added to them on trained tokens. A response with tokens that are not trained on (tool output between two
    turns) has them in `response_tensor`, and its mask rides along. Left out are rows that are not finished
    (aborted, failed, generating) and rows of which nothing is trained on, text without tokens among them.

    Args:
        source: a Scan, a TrajectoryBatch, or a table of stored rows.
        log_probs: "trainer" takes `log_probs`; "behavior" takes `behavior_log_probs` where a row has none.
        reference: a column of the user's own with the reference policy's log-probs.
        kl_coefficient: weight of log p - log p_ref.
        not_finite: what a NaN or infinite log-prob on a trained token does: an error, or the token is masked
            (its value stays as it is; no 0.0 is made up).

    Raises:
        InputError: an option is unknown.
        SchemaError: the reference column is not there.
        ValidationError: a row has no split, no log-probs or no values, or such a log-prob.
    """
    for name, value, kinds in (("log_probs", log_probs, LogProbs), ("not_finite", not_finite, NotFinite)):
        if value not in get_args(kinds):
            raise InputError(f"{name} is {value!r}, expected one of {', '.join(get_args(kinds))}")
    table = flat.read(source, (*NEEDED, *([reference] if reference else [])), OPTIONAL)
    options = _Options(log_probs, reference, kl_coefficient, not_finite)
    parts, seen = [], 0
    dropped: Counter[str] = Counter()
    for batch in flat.blocks(table):
        part = _part(batch, seen, options)
        parts.append(part)
        dropped.update(part.dropped)
        seen += len(batch)
    columns = {name: _joined([part.columns[name] for part in parts], name) for name in _TENSORS}
    if all(chunk.all() for chunk in columns["response_masks"].chunks):
        del columns["response_masks"]
    lengths = columns["query_tensors"].length + columns["response_tensors"].length
    keys = np.concatenate([np.zeros(0, np.int64), *(part.keys for part in parts)])
    lists = _lists([id for part in parts for id in part.ids], lengths, keys, columns)
    return PPODataset(lists, dict(+dropped), sum(part.zeros for part in parts))


@dataclass(frozen=True)
class _Options:
    log_probs: LogProbs
    reference: str | None
    kl_coefficient: float
    not_finite: NotFinite


@dataclass(frozen=True)
class _Part:
    columns: dict[str, tuple[NDArray[Any], Int64s]]  # flat values, and [B] how many of them each row has
    ids: list[str]
    keys: Int64s
    zeros: int
    dropped: dict[str, int]


def _part(batch: pa.RecordBatch, first_row: int, options: _Options) -> _Part:
    tokens, offsets = flat.offsets_of(batch)
    lengths = np.diff(offsets)
    finished = ~flat.unfinished(batch)
    prompts = flat.integers(batch, "prompt_length", -1)
    refuse(
        batch,
        first_row,
        "prompt_length",
        finished & (prompts < 0) & (lengths > 0),
        "the split into prompt and response is not known",
        "store the row with prompt_length and response_length",
    )
    prompts = np.where(finished, prompts.clip(0, lengths), lengths)
    responses = lengths - prompts
    response = np.zeros(len(tokens), np.bool_)
    response[flat.ranges(offsets[:-1] + prompts, responses)] = True
    mask = flat.masks(batch, offsets, first_row).trained & response
    wanted = any_token(mask, offsets)
    log_probs = log_probs_of(batch, offsets, first_row, options.log_probs, wanted)
    values = values_of(batch, offsets, first_row, wanted)
    broken = mask & ~np.isfinite(log_probs)
    if options.not_finite == "error":
        refuse(
            batch,
            first_row,
            "log_probs",
            any_token(broken, offsets),
            "the log-prob of a trained token is not finite",
            'pass not_finite="mask" to leave such tokens out of the loss',
        )
    mask = mask & ~broken
    trained = any_token(mask, offsets)
    rewards = rewards_of(batch, offsets, mask, trained)
    if options.reference is not None:
        penalty = penalties_of(
            batch, offsets, log_probs, first_row, options.reference, options.kl_coefficient, wanted
        )
        rewards = rewards + np.where(mask, penalty, np.float32(0))
    kept = np.flatnonzero(trained)
    at = flat.ranges((offsets[:-1] + prompts)[kept], responses[kept])
    sources = (tokens, log_probs, values, rewards, mask.view(np.int8))
    columns = {name: (x[at], responses[kept]) for name, x in zip(_TENSORS[1:], sources, strict=True)}
    columns["query_tensors"] = (tokens[flat.ranges(offsets[:-1][kept], prompts[kept])], prompts[kept])
    return _Part(
        columns,
        batch.column("id").take(pa.array(kept)).to_pylist(),
        batch.column("id_hash").to_numpy()[kept],
        int((mask & (log_probs == 0)).sum()),
        {flat.UNFINISHED: int((~finished).sum()), NOTHING_TRAINED: int((finished & ~trained).sum())},
    )


def collate(
    elements: Sequence[PPORLElement], *, pad_token_id: int, padding_side: Side = "left"
) -> PPORLBatch:
    """Elements as one batch, as trlX collates them.

    Queries are padded with pad_token_id on `padding_side`, responses with it on the right, floats on the
    right with 0, to their own width. Response masks are padded with 0; an element without one has all
    ones, and when none has one there is none.

    Raises:
        InputError: padding_side is unknown, or there are no elements.
    """
    if not elements:
        raise InputError("there are no elements to collate")
    columns = {}
    masked = any(element.response_mask is not None for element in elements)
    for name, field in zip(_TENSORS, _FIELDS, strict=True):
        if name == "response_masks" and not masked:
            continue
        rows = [_array(element, field) for element in elements]
        lengths = np.array([len(row) for row in rows], np.int64)
        columns[name] = _joined([(np.concatenate(rows), lengths)], name)
    count = np.zeros(len(elements), np.int64)
    return PPORLBatch(
        **_padded(_lists([""] * len(elements), count, count, columns), pad_token_id, padding_side)
    )


def _array(element: PPORLElement, field: str) -> NDArray[Any]:
    value = getattr(element, field)
    if value is None:  # only response_mask may be
        return np.ones(len(element.response_tensor), np.int8)
    array: NDArray[Any] = value.detach().cpu().numpy()
    return array


def ppo_trajectories(elements: Sequence[PPORLElement], *, pad_token_id: int) -> list[Trajectory]:
    """Elements as rows for a store: the rewards become `token_rewards`, the log-probs the trainer's.

    Response tokens past the last value are the padding of a rollout chunk and are left out. They are told by
    their position; `pad_token_id` is only there to check it. Padding inside a query cannot be told from
    prompt tokens, so it stays.

    Raises:
        ValidationError: a response token without a value is not padding; logprobs, values and rewards differ
            in length.
    """
    return [_trajectory(i, element, pad_token_id) for i, element in enumerate(elements)]


def _trajectory(i: int, element: PPORLElement, pad_token_id: int) -> Trajectory:
    sizes = {name: len(getattr(element, name)) for name in ("logprobs", "values", "rewards")}
    size = sizes["values"]
    response = element.response_tensor.tolist()
    if len(set(sizes.values())) > 1 or size > len(response):
        raise ValidationError(f"lengths are {sizes} for {len(response)} response tokens", row=i)
    if any(token != pad_token_id for token in response[size:]):
        raise ValidationError(
            f"{len(response) - size} response tokens have no value, and not all of them are padding",
            row=i,
            column="response_tensor",
        )
    prompt = element.query_tensor.tolist()
    mask: list[int] = []
    if element.response_mask is not None:
        mask = [0] * len(prompt) + element.response_mask.tolist()[:size]
    return Trajectory(
        prompt_tokens=prompt,
        response_tokens=response[:size],
        loss_mask=mask,
        log_probs=element.logprobs.tolist(),
        values=element.values.tolist(),
        token_rewards=element.rewards.tolist(),
        status=TrajectoryStatus.COMPLETED,
    )


def history(elements: Sequence[PPORLElement], *, only_text: bool = False) -> list[dict[str, list[Any]]]:
    """Elements as trlX's `export_history` writes them: {field: list}, or query and response only."""
    names = _FIELDS[:2] if only_text else _FIELDS
    plain = ({name: getattr(element, name) for name in names} for element in elements)
    return [{name: x.tolist() for name, x in fields.items() if x is not None} for fields in plain]


def recompute(
    source: ArrowSource | pa.Table,
    *,
    gamma: float,
    lam: float,
    log_probs: LogProbs = "trainer",
    reference: str | None = None,
    kl_coefficient: float = 0.0,
) -> pa.Table:
    """Advantages and returns of stored rows, ready for `store.maintenance.update`.

    They go from trained action to trained action; `values` at an action is V of the state before it. A row
    with `terminated` false bootstraps from its `bootstrap_value`; the others end. With a reference the KL
    penalty is part of the rewards, and a column of its own.

    Args:
        log_probs, reference, kl_coefficient: as in `ppo_dataset`.

    Returns:
        `id`, `advantages` and `returns`, lists of float32 as long as `tokens`, 0 where nothing is trained;
        with a reference also `kl_penalty`, for a column of the user's own.

    Raises:
        SchemaError: the reference column is not there.
        ValidationError: a row has no values, or is cut off and has no bootstrap_value.
    """
    table = flat.read(source, (*NEEDED, *([reference] if reference else [])), (*OPTIONAL, *_ENDS))
    names = ("advantages", "returns", *(["kl_penalty"] if reference else []))
    out, seen = [pa.table({"id": pa.array([], pa.string()), **dict.fromkeys(names, _EMPTY)})], 0
    for batch in flat.blocks(table):
        tokens, offsets = flat.offsets_of(batch)
        mask = flat.masks(batch, offsets, seen).trained
        every = np.ones(len(batch), np.bool_)
        values = values_of(batch, offsets, seen, every)
        cut_off = flat.flags(batch, "terminated") == 0
        refuse(
            batch,
            seen,
            "bootstrap_value",
            cut_off & ~flat.present(batch, "bootstrap_value"),
            "the episode was cut off (terminated is false) and its value there is not known",
            "store bootstrap_value, V after the last token",
        )
        bootstrap = np.zeros(len(batch))
        if cut_off.any():
            bootstrap[cut_off] = batch.column("bootstrap_value").to_numpy(zero_copy_only=False)[cut_off]
        at = np.flatnonzero(mask)
        rows = np.searchsorted(at, offsets)
        rewards = rewards_of(batch, offsets, mask, np.diff(rows) > 0)[at]
        penalty: list[NDArray[Any]] = []
        if reference is not None:
            known = log_probs_of(batch, offsets, seen, log_probs, every)
            penalty = [penalties_of(batch, offsets, known, seen, reference, kl_coefficient, every)[at]]
            rewards = rewards + penalty[0]
        made = [*gae(rewards, values[at], rows, bootstrap, gamma=gamma, lam=lam), *penalty]
        columns = {"id": batch.column("id")}
        for name, x in zip(names, made, strict=True):
            whole = np.zeros(len(tokens), np.float32)
            whole[at] = x
            columns[name] = flat.lists(whole, np.diff(offsets))
        out.append(pa.table(columns))
        seen += len(batch)
    return pa.concat_tables(out)


_EMPTY = flat.lists(np.zeros(0, np.float32), np.zeros(0, np.int64))


def _joined(parts: Sequence[tuple[NDArray[Any], Int64s]], name: str) -> Ragged:
    kind = {"query_tensors": np.int32, "response_tensors": np.int32, "response_masks": np.int8}.get(
        name, np.float32
    )
    values = np.concatenate([np.zeros(0, kind), *(part[0] for part in parts)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(part[1] for part in parts)])
    return Ragged((values,), np.zeros(len(lengths), np.int64), np.cumsum(lengths) - lengths, lengths)


def _lists(ids: Sequence[str], lengths: Int64s, keys: Int64s, columns: dict[str, Ragged]) -> Lists:
    whole = ("query_tensors", "response_tensors", "response_masks")
    dtypes = {name: np.int64 if name in whole else np.float32 for name in columns}
    return Lists(ids, lengths, keys, columns, dtypes, aligned=frozenset())


def _padded(rows: Lists, pad_token_id: int, padding_side: Side) -> dict[str, Tensor]:
    """Queries on their side, the rest on the right."""
    if padding_side not in get_args(Side):
        raise InputError(f"padding_side is {padding_side!r}, expected left or right")
    pads = dict.fromkeys(("query_tensors", "response_tensors"), pad_token_id)
    queries = {"query_tensors": rows.columns["query_tensors"]}
    rest = {name: column for name, column in rows.columns.items() if name not in queries}
    arrays: dict[str, NDArray[Any]] = {}
    for columns, side in ((queries, padding_side), (rest, "right")):
        part = Lists(rows.ids, rows.lengths, rows.keys, columns, rows.dtypes, pads, aligned=frozenset())
        arrays |= layouts.padded(part, Options(padding_side=side)).arrays
    return layouts.to_torch(arrays)
