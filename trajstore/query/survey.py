"""Owns the one pass that metrics and doctor need: per-token columns reduced to sums a row; judges nothing.

A survey is a polars frame with one row a trajectory, in order of arrival: the scalars of the row and, when
tokens were asked for, the sums below. Everything that is then asked is a reduction of this frame, so a store
is read once, a row group at a time, and what stays in memory is a few numbers a row.

Axis letters: N rows of a piece, T tokens of all of them, row after row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.batch import TrajectoryBatch
from trajstore.errors import QueryError
from trajstore.schema import BY_NAME
from trajstore.selection import seeded_keys
from trajstore.selection.steps import scalar
from trajstore.store import Scan, TrajectoryStore
from trajstore.trajectory import PolicyVersion, version_number

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Source = TrajectoryStore | Scan | TrajectoryBatch

SCALARS = (
    *(
        "id",
        "id_hash",
        "group_id",
        "group_size",
        "length",
        "prompt_length",
        "response_length",
        "reward",
        "status",
    ),
    *("finish_reason", "terminated", "version_known", "version_id", "oldest_version_id", "newest_version_id"),
    *("log_probs_version", "tokens_retokenized", "parent_id", "source", "writer_id", "writer_seq"),
)
"""Columns that `facts` reads; none is a list."""

TOKEN_COLUMNS = (
    *("tokens", "attention_mask", "loss_mask", "action_mask", "log_probs", "behavior_log_probs"),
)
"""List columns that `survey` reads."""

CLIP = 0.2
"""PPO's epsilon: a ratio outside 1 ± CLIP is clipped (Schulman et al., 2017)."""

ROUNDING = 1e-3
"""Nats above 0 that a log-prob may be by rounding in half precision."""


@dataclass(frozen=True)
class Survey:
    """Rows of a scan as one frame.

    Attributes:
        at: the policy version that gaps are counted from.
        by: what a task is: a scalar column, or `metadata.KEY`.
        frame: one row a trajectory, in order of arrival: SCALARS, `task` (text), `gap` (at - oldest version,
            null where not known), `drift_gap` (the same from the version that log_probs are of) and,
            from `survey`, the columns of `MEASURES`.
    """

    at: int | None
    by: str
    frame: pl.DataFrame

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def finished(self) -> pl.DataFrame:
        """Rows whose status is completed: what one trains on."""
        return self.frame.filter(pl.col("status") == "completed")


def facts(source: Source, *, at: PolicyVersion | int | None = None, by: str = "source") -> Survey:
    """The scalars of every row; no per-token column is read.

    Args:
        source: a store, a scan of it, or a batch in memory.
        at: the current policy version; the newest one in the rows unless given.
        by: what a task is: a scalar column, or `metadata.KEY` for a key of the JSON in `metadata`.

    Raises:
        QueryError: `by` is not a scalar column.
    """
    source = source.scan() if isinstance(source, TrajectoryStore) else source
    task = scalar(by)
    (root,) = task.meta.root_names()
    frame = _scalars(source, dict.fromkeys((*SCALARS, root)))
    if frame.schema[root].is_nested():
        raise QueryError(f"column {by!r} is a list", hint="name a scalar column, or metadata.KEY")
    newest = max(frame["newest_version_id"].drop_nulls().to_list(), default=None)
    now = newest if at is None else version_number(at)
    oldest, current = pl.col("oldest_version_id"), pl.lit(now, pl.Int64)
    lengths = ("length", "prompt_length", "response_length", "group_size")  # sums of int32 would wrap
    frame = frame.with_columns(
        task=task.cast(pl.String),
        gap=current - oldest,
        drift_gap=pl.coalesce("log_probs_version", current) - oldest,
        **{name: pl.col(name).cast(pl.Int64) for name in lengths},
    )
    return Survey(now, by, frame if root in SCALARS else frame.drop(root))


def _scalars(source: Scan | TrajectoryBatch, names: Iterable[str]) -> pl.DataFrame:
    if isinstance(source, Scan):
        return source.columns(list(names)).to_polars()
    table = source.to_arrow()
    for name in names:
        if name not in table.schema.names:  # a batch has none of what the store stamps on a row
            if name not in BY_NAME:
                raise QueryError(f"there is no column {name!r}", hint=f"columns: {', '.join(BY_NAME)}")
            table = table.append_column(name, pa.nulls(len(table), BY_NAME[name].type))
    frame = pl.from_arrow(table.select(list(names)))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _pieces(source: Scan | TrajectoryBatch, names: Sequence[str]) -> Iterator[tuple[Int64s, pa.Table]]:
    if isinstance(source, Scan):
        yield from source.pieces(names)
        return
    at = 0
    for batch in source.to_arrow().select(names).to_batches():
        yield np.arange(at, at + batch.num_rows), pa.Table.from_batches([batch])
        at += batch.num_rows


def survey(source: Source, *, at: PolicyVersion | int | None = None, by: str = "source") -> Survey:
    """The scalars of every row and the sums over its tokens that MEASURES names; see `facts`.

    Raises:
        QueryError: `by` is not a scalar column.
        CorruptFileError: a data file cannot be read.
    """
    source = source.scan() if isinstance(source, TrajectoryStore) else source
    known = facts(source, at=at, by=by)
    whole = {name: np.zeros(len(known), dtype) for name, dtype in MEASURES.items()}
    for positions, table in _pieces(source, ("length", "prompt_length", *TOKEN_COLUMNS)):
        for name, values in measure(table).items():
            whole[name][positions] = values
    return Survey(known.at, by, known.frame.with_columns(**{n: pl.Series(v) for n, v in whole.items()}))


MEASURES: dict[str, Any] = {
    "actions": np.int64,  # tokens the policy sampled (action_mask, else loss_mask, else the response)
    "loss_tokens": np.int64,  # tokens that are trained on (loss_mask, else the response)
    "has_split": np.bool_,  # a loss mask is given or follows from the split
    "loss_on_prompt": np.int64,  # loss tokens before the response
    "loss_off_action": np.int64,  # loss tokens that action_mask says the policy did not sample
    "loss_off_attention": np.int64,  # loss tokens that attention_mask hides
    "mask_shifted": np.bool_,  # loss_mask is that of the response, one place early
    "log_probs_shifted": np.bool_,  # behavior log-probs are those of the response, one place early
    "has_behavior": np.bool_,
    "has_log_probs": np.bool_,
    "behavior_zero": np.int64,  # action tokens whose behavior log-prob is exactly 0
    "behavior_positive": np.int64,  # ... is above 0, a probability above 1
    "not_finite": np.int64,  # action tokens whose log-prob of either kind is NaN or infinite
    "ratio_tokens": np.int64,  # action tokens with both log-probs, finite
    "log_ratio_sum": np.float64,  # of log_probs - behavior_log_probs over them
    "log_ratio_abs": np.float64,
    "log_ratio_max": np.float64,  # the largest absolute value
    "k2_sum": np.float64,
    "k3_sum": np.float64,
    "clipped_low": np.int64,  # ratios below 1 - CLIP
    "clipped_high": np.int64,  # ratios above 1 + CLIP
    "log_weight": np.float64,  # log of the sum of the ratios, -inf when there are none
    "log_weight_squared": np.float64,  # log of the sum of their squares
    "prompt_hash": np.uint64,  # 64-bit hashes of the token ids in their order
    "response_hash": np.uint64,
}


def measure(table: pa.Table) -> dict[str, NDArray[Any]]:
    """The sums of MEASURES for N rows, [N] each, from flat buffers; no Python runs per row or token."""
    piece = _Piece.of(table)
    out: dict[str, NDArray[Any]] = {}
    _masks(piece, out)
    _log_probs(piece, out)
    _hashes(piece, out)
    return out


@dataclass(frozen=True)
class _Piece:
    """N rows as flat arrays: every per-token column is null or exactly as long as `tokens` (DESIGN §3).

    Attributes:
        lengths, starts: [N] int64.
        prompt: [N] int64, -1 where the split is not known.
        place: [T] int64, index of each token in its row.
        row: [T] int64, row of each token.
        action: [T] whether the policy sampled it.
        loss: [T] whether it is trained on.
    """

    table: pa.Table
    lengths: Int64s
    starts: Int64s
    prompt: Int64s
    place: Int64s
    row: Int64s
    action: Bools
    loss: Bools
    _flat: dict[str, tuple[NDArray[Any], Bools]] = field(default_factory=dict)

    @staticmethod
    def of(table: pa.Table) -> _Piece:
        lengths = table["length"].to_numpy().astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        prompt = table["prompt_length"].fill_null(-1).to_numpy().astype(np.int64)
        row = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(int(lengths.sum())) - starts[row]
        empty = np.zeros(0, np.bool_)
        piece = _Piece(table, lengths, starts, prompt, place, row, empty, empty)
        split = prompt[row]
        response = (split >= 0) & (place >= split)
        loss = piece.either("loss_mask", response)
        return _Piece(
            table, lengths, starts, prompt, place, row, piece.either("action_mask", loss), loss, piece._flat
        )

    def flat(self, name: str) -> tuple[NDArray[Any], Bools]:
        """The column's values, [T], 0 in null rows; and whether each row has them, [N]."""
        if name not in self._flat:
            column = self.table[name]
            given = column.is_valid().to_numpy().astype(np.bool_)
            values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
            joined = np.concatenate(values) if values else np.zeros(0, np.int8)
            if not given.all():
                whole = np.zeros(len(self.row), joined.dtype)
                whole[given[self.row]] = joined
                joined = whole
            self._flat[name] = joined, given
        return self._flat[name]

    def either(self, name: str, otherwise: Bools) -> Bools:
        """The mask of that name, [T], or `otherwise` in rows that do not have it."""
        values, given = self.flat(name)
        return np.where(given[self.row], values != 0, otherwise)

    def total(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sum of each row's values, [N]."""
        return self._reduce(np.add, values, 0)

    def most(self, values: NDArray[Any], least: float) -> NDArray[Any]:
        """Largest of each row's values, [N]; `least` where a row has none."""
        return self._reduce(np.maximum, values, least)

    def _reduce(self, how: np.ufunc, values: NDArray[Any], empty: float) -> NDArray[Any]:
        some = self.lengths > 0  # reduceat gives an empty stretch the value that follows it
        dtype = np.dtype(np.int64) if values.dtype == np.bool_ else values.dtype
        out = np.full(len(self.lengths), empty, dtype)
        if some.any():
            out[some] = how.reduceat(values, self.starts[some], dtype=dtype)
        return out


def _masks(piece: _Piece, out: dict[str, NDArray[Any]]) -> None:
    _, loss_given = piece.flat("loss_mask")
    _, action_given = piece.flat("action_mask")
    split = piece.prompt[piece.row]
    hidden = piece.either("attention_mask", np.ones(len(piece.row), np.bool_))
    out["actions"] = piece.total(piece.action)
    out["loss_tokens"] = piece.total(piece.loss)
    out["has_split"] = loss_given | (piece.prompt >= 0)
    out["loss_on_prompt"] = piece.total(piece.loss & (piece.place < split))
    out["loss_off_action"] = np.where(action_given, piece.total(piece.loss & ~piece.action), 0)
    out["loss_off_attention"] = piece.total(piece.loss & ~hidden)
    early = (piece.place >= split - 1) & (piece.place < piece.lengths[piece.row] - 1)
    out["mask_shifted"] = _is_shifted(piece, loss_given, piece.loss, early)


def _is_shifted(piece: _Piece, given: Bools, marked: Bools, early: Bools) -> Bools:
    """Rows with a prompt and a response whose marks are those of the response, one place early."""
    there = given & (piece.prompt > 0) & (piece.prompt < piece.lengths)
    return there & (piece.total(marked != early) == 0)  # type: ignore[no-any-return]  # numpy says Any


def _log_probs(piece: _Piece, out: dict[str, NDArray[Any]]) -> None:
    behavior, has_behavior = piece.flat("behavior_log_probs")
    current, has_current = piece.flat("log_probs")
    action = piece.action
    b_sampled = action & has_behavior[piece.row]
    p_sampled = action & has_current[piece.row]
    with np.errstate(invalid="ignore"):
        out["behavior_zero"] = piece.total(b_sampled & (behavior == 0))
        out["behavior_positive"] = piece.total(b_sampled & (behavior > ROUNDING))
        early = (piece.place >= piece.prompt[piece.row] - 1) & (piece.place < piece.lengths[piece.row] - 1)
        # A real log-prob of exactly 0 in mid-response happens, so only rows without one are judged.
        out["log_probs_shifted"] = _is_shifted(piece, has_behavior, behavior != 0, early)
    bad = (b_sampled & ~np.isfinite(behavior)) | (p_sampled & ~np.isfinite(current))
    out["has_behavior"], out["has_log_probs"] = has_behavior, has_current
    out["not_finite"] = piece.total(bad)
    both = b_sampled & p_sampled & ~bad
    ratio = np.zeros(len(both))
    np.subtract(current, behavior, out=ratio, where=both, dtype=np.float64)
    log_ratio_sums(piece, ratio, both, out)


def log_ratio_sums(piece: _Piece, ratio: Floats, both: Bools, out: dict[str, NDArray[Any]]) -> None:
    """Sums of the log-ratio (0 where `both` is false) and of what the estimators need.

    Ratios are summed as logarithms from the row's largest, so that none overflows.
    """
    size = np.abs(ratio)
    out["ratio_tokens"] = piece.total(both)
    out["log_ratio_sum"] = piece.total(ratio)
    out["log_ratio_abs"] = piece.total(size)
    out["log_ratio_max"] = piece.most(size, 0.0)
    out["k2_sum"] = piece.total(ratio * ratio) / 2
    with np.errstate(over="ignore"):
        out["k3_sum"] = piece.total(np.expm1(ratio) - ratio)
    low, high = np.log1p(-CLIP), np.log1p(CLIP)
    out["clipped_low"] = piece.total(both & (ratio < low))
    out["clipped_high"] = piece.total(both & (ratio > high))
    top = piece.most(np.where(both, ratio, -np.inf), -np.inf)
    anchor = np.where(np.isfinite(top), top, 0.0)
    weight = np.where(both, np.exp(ratio - anchor[piece.row]), 0.0)
    with np.errstate(divide="ignore"):
        out["log_weight"] = np.log(piece.total(weight)) + anchor
        out["log_weight_squared"] = np.log(piece.total(weight * weight)) + 2 * anchor


def _hashes(piece: _Piece, out: dict[str, NDArray[Any]]) -> None:
    tokens, _ = piece.flat("tokens")
    split = np.maximum(piece.prompt, 0)[piece.row]
    answers = piece.place >= split
    place = np.where(answers, piece.place - split, piece.place)
    # A sum of well-mixed (token, place) pairs names a row's tokens and their order.
    mixed = seeded_keys((tokens.astype(np.int64) << 32) ^ place, 0)
    zero = np.uint64(0)
    out["prompt_hash"] = piece.total(np.where(answers, zero, mixed))
    out["response_hash"] = piece.total(np.where(answers, mixed, zero))
