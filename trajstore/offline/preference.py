"""Owns preference pairs, KTO and step labels and filtered SFT sets from rewarded rows; trains nothing.

Column names are TRL's. Rows of a group answer one prompt. What is left out is counted by reason, and a set
says where it comes from: the query and snapshot in its metadata, the ids of its rows in columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trajstore.errors import InputError
from trajstore.offline import flat, ilql
from trajstore.offline.flat import ArrowSource
from trajstore.offline.ilql_set import METADATA_KEY
from trajstore.offline.transitions import to_transitions

Pairing = Literal["best_worst", "all"]

NEEDED = ("id", "length", "prompt_length", "tokens", "reward", "prompt", "response")

NO_GROUP = "no group_id"
NO_SPLIT = "the split into prompt and response is not known"
NO_RESPONSE = "no response"
NOT_FINITE = "reward is not finite"
OTHER_PROMPT = "prompt differs from its group's"
DUPLICATE = "duplicate"
ALONE = "alone in its group"
NO_MARGIN = "no pair with a margin"
IDENTICAL = "identical after truncation"
LENGTHS = "lengths too different"
BETWEEN = "between the thresholds"
LOW = "not among the best"
NO_TOKEN_REWARDS = "no token_rewards"


@dataclass(frozen=True)
class PreferenceSet:
    """Rows for a trainer.

    Attributes:
        table: columns as TRL names them, and ours (ids, rewards, token ids).
        dropped: what was left out, by reason: rows, and pairs for reasons of pairs.
    """

    table: pa.Table
    dropped: dict[str, int]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def write(self, path: str | Path) -> None:
        """Writes Parquet, or JSON lines when the name ends with .jsonl (its provenance then lies beside it).

        Raises:
            InputError: the name ends with neither .parquet nor .jsonl.
        """
        path = Path(path)
        said = self.table.schema.metadata[METADATA_KEY].decode()
        if path.suffix == ".parquet":
            pq.write_table(self.table, path)
        elif path.suffix == ".jsonl":
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self.table.to_pylist())
            path.write_text("".join(lines), encoding="utf-8")
            path.with_suffix(".meta.json").write_text(said + "\n", encoding="utf-8")
        else:
            raise InputError(f"{path.name} ends with neither .parquet nor .jsonl")


def preference_pairs(
    source: ArrowSource | pa.Table,
    *,
    pairing: Pairing = "best_worst",
    margin: float = 0.0,
    max_length: int | None = None,
    length_ratio: float | None = None,
) -> PreferenceSet:
    """Pairs for DPO: within a group, a response and one with a lower reward.

    Equal rewards never form a pair. Of equal responses in a group the first is taken. "best_worst" makes one
    pair a group; among equally good and equally bad ones it takes the two of most similar length, then the
    first.

    Args:
        source: a Scan, a TrajectoryBatch, or a table of stored rows.
        pairing: "best_worst", or "all" pairs.
        margin: the rewards of a pair differ by more than this.
        max_length: tokens of prompt and response that a trainer keeps; pairs that are the same up to there
            carry no signal and are left out. The set itself is not cut.
        length_ratio: a pair's longer response is at most so many times as long as the shorter one.

    Raises:
        InputError: an option is unknown or out of range.
    """
    if pairing not in get_args(Pairing):
        raise InputError(f"pairing is {pairing!r}, expected one of {', '.join(get_args(Pairing))}")
    ranges = (("margin", margin, 0), ("length_ratio", length_ratio, 1), ("max_length", max_length, 1))
    for name, value, least in ranges:
        if value is not None and not value >= least:
            raise InputError(f"{name} is {value}, expected at least {least}")
    rows, dropped = _rows(source)
    pairs: list[tuple[_Row, _Row]] = []
    for members in _groups(rows, dropped):
        if len(members) < 2:
            dropped[ALONE] += 1
            continue
        candidates = _candidates(members, pairing)
        above = [(good, bad) for good, bad in candidates if good.reward - bad.reward > margin]
        if not above:
            dropped[NO_MARGIN] += 1
        for good, bad in above:
            if max_length is not None and good.upto(max_length) == bad.upto(max_length):
                dropped[IDENTICAL] += 1
            elif length_ratio is not None and _ratio(good, bad) > length_ratio:
                dropped[LENGTHS] += 1
            else:
                pairs.append((good, bad))
    columns: dict[str, Any] = {
        "prompt": [good.prompt for good, _ in pairs],
        "chosen": [good.response for good, _ in pairs],
        "rejected": [bad.response for _, bad in pairs],
        "score_chosen": pa.array([good.reward for good, _ in pairs], pa.float64()),
        "score_rejected": pa.array([bad.reward for _, bad in pairs], pa.float64()),
        "prompt_input_ids": _ids([good.prompt_ids for good, _ in pairs]),
        "chosen_input_ids": _ids([good.response_ids for good, _ in pairs]),
        "rejected_input_ids": _ids([bad.response_ids for _, bad in pairs]),
        "group_id": [good.group for good, _ in pairs],
        "chosen_id": [good.id for good, _ in pairs],
        "rejected_id": [bad.id for _, bad in pairs],
    }
    said = {"pairing": pairing, "margin": margin, "max_length": max_length, "length_ratio": length_ratio}
    return _made("dpo", columns, dropped, source, said)


def kto_labels(
    source: ArrowSource | pa.Table, *, desirable: float, undesirable: float | None = None
) -> PreferenceSet:
    """Unpaired labels for KTO: true from a reward of `desirable` on, false below `undesirable`.

    Args:
        undesirable: None = the same threshold; what lies between the two is left out.

    Raises:
        InputError: `undesirable` is above `desirable`.
    """
    low = desirable if undesirable is None else undesirable
    if low > desirable:
        raise InputError(f"undesirable is {low}, expected at most desirable, {desirable}")
    rows, dropped = _rows(source, grouped=False)
    kept = [row for row in rows if row.reward >= desirable or row.reward < low]
    dropped[BETWEEN] += len(rows) - len(kept)
    columns = _completions(kept) | {"label": pa.array([row.reward >= desirable for row in kept], pa.bool_())}
    return _made("kto", columns, dropped, source, {"desirable": desirable, "undesirable": low})


def sft_rows(
    source: ArrowSource | pa.Table, *, min_reward: float | None = None, top: float | None = None
) -> PreferenceSet:
    """Rows worth imitating (rejection sampling): above a reward, or the best part of each group.

    Args:
        min_reward: rows with at least this reward.
        top: 0 to 1, the part of each group that stays: at least one row, the first of equal ones. Equal
            responses of a group count once.

    Raises:
        InputError: neither is given, or `top` is out of range.
    """
    if min_reward is None and top is None:
        raise InputError("give min_reward or top", hint="top=0.2 keeps the best fifth of each group")
    if top is not None and not 0 < top <= 1:
        raise InputError(f"top is {top}, expected above 0 and at most 1")
    rows, dropped = _rows(source, grouped=top is not None)
    kept = rows
    if top is not None:
        kept = []
        for members in _groups(rows, dropped):
            best = sorted(members, key=lambda row: -row.reward)[: max(1, int(top * len(members)))]
            dropped[LOW] += len(members) - len(best)
            kept += best
    if min_reward is not None:
        above = [row for row in kept if row.reward >= min_reward]
        dropped[LOW] += len(kept) - len(above)
        kept = above
    return _made("sft", _completions(kept), dropped, source, {"min_reward": min_reward, "top": top})


def step_labels(
    source: ArrowSource | pa.Table, decode: Callable[[list[int]], str], *, threshold: float = 0.0
) -> PreferenceSet:
    """Stepwise labels for process reward models: a step is a turn, and right when it earned enough.

    Args:
        source: rows with `token_rewards`; those without are left out.
        decode: token ids → text, as of the tokenizer that made them.
        threshold: a turn that earned more than this is labelled true.

    Returns:
        TRL's `prompt`, `completions` and `labels`, and `id`. Text of the environment between two turns is in
        none of them.
    """
    table = flat.read(source, ilql.NEEDED, ilql.OPTIONAL)
    dropped: Counter[str] = Counter()
    if "token_rewards" in table.schema.names:
        given = table.filter(pc.is_valid(table.column("token_rewards")))
    else:
        given = table.slice(0, 0)
    dropped[NO_TOKEN_REWARDS] = len(table) - len(given)
    data = ilql.ilql_dataset(given)
    dropped.update(data.report.dropped)
    rows: dict[str, list[Any]] = {"prompt": [], "completions": [], "labels": [], "id": []}
    for turn in to_transitions(data).select(["id", "turn", "observation", "action", "reward"]).to_pylist():
        if turn["turn"] == 0:
            rows["prompt"].append(decode(turn["observation"]))
            rows["id"].append(turn["id"])
            rows["completions"].append([])
            rows["labels"].append([])
        rows["completions"][-1].append(decode(turn["action"]))
        rows["labels"][-1].append(turn["reward"] > threshold)
    columns: dict[str, Any] = rows | {
        "completions": pa.array(rows["completions"], pa.list_(pa.string())),
        "labels": pa.array(rows["labels"], pa.list_(pa.bool_())),
    }
    return _made("stepwise", columns, dropped, source, {"threshold": threshold})


@dataclass(frozen=True, eq=False)
class _Row:
    id: str
    group: str | None
    prompt: str
    response: str
    reward: float
    prompt_ids: NDArray[Any]
    response_ids: NDArray[Any]

    def upto(self, length: int) -> bytes:
        """The tokens a trainer keeps of the response."""
        kept: bytes = self.response_ids[: max(length - len(self.prompt_ids), 0)].tobytes()
        return kept


def _rows(source: ArrowSource | pa.Table, *, grouped: bool = True) -> tuple[list[_Row], Counter[str]]:
    """Rows that can be used, as views of their tokens, and why the others cannot."""
    table = flat.read(source, NEEDED, ("group_id",))
    rows: list[_Row] = []
    dropped: Counter[str] = Counter()
    for batch in flat.blocks(table):
        tokens, offsets = flat.offsets_of(batch)
        prompts = flat.integers(batch, "prompt_length", -1)
        rewards = batch.column("reward").to_numpy()
        has_group = "group_id" in batch.schema.names
        groups = batch.column("group_id").to_pylist() if has_group else [None] * len(batch)
        names = [batch.column(name).to_pylist() for name in ("id", "prompt", "response")]
        for i, (id, prompt, response) in enumerate(zip(*names, strict=True)):
            split, end = offsets[i] + prompts[i], offsets[i + 1]
            if prompts[i] < 0:
                dropped[NO_SPLIT] += 1
            elif split == end:
                dropped[NO_RESPONSE] += 1
            elif not np.isfinite(rewards[i]):
                dropped[NOT_FINITE] += 1
            elif grouped and groups[i] is None:
                dropped[NO_GROUP] += 1
            else:
                parts = tokens[offsets[i] : split], tokens[split:end]
                rows.append(_Row(id, groups[i], prompt, response, float(rewards[i]), *parts))
    return rows, dropped


def _groups(rows: Sequence[_Row], dropped: Counter[str]) -> Iterator[list[_Row]]:
    """Members of each group that answer its first one's prompt, each response once."""
    groups: dict[str | None, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for members in groups.values():
        prompt = members[0].prompt_ids.tobytes()
        seen: dict[bytes, _Row] = {}
        for row in members:
            if row.prompt_ids.tobytes() != prompt:
                dropped[OTHER_PROMPT] += 1
            elif row.response_ids.tobytes() in seen:
                dropped[DUPLICATE] += 1
            else:
                seen[row.response_ids.tobytes()] = row
        yield list(seen.values())


def _candidates(members: Sequence[_Row], pairing: Pairing) -> list[tuple[_Row, _Row]]:
    """Pairs of a group, the better one first; equal rewards are no pair."""
    if pairing == "all":
        ordered = sorted(members, key=lambda row: -row.reward)
        return [(a, b) for a, b in combinations(ordered, 2) if a.reward > b.reward]
    high, low = max(row.reward for row in members), min(row.reward for row in members)
    if high == low:
        return []
    best = [row for row in members if row.reward == high]
    worst = [row for row in members if row.reward == low]
    return [min(((a, b) for a in best for b in worst), key=_distance)]


def _distance(pair: tuple[_Row, _Row]) -> int:
    return abs(len(pair[0].response_ids) - len(pair[1].response_ids))


def _ratio(a: _Row, b: _Row) -> float:
    short, long = sorted((len(a.response_ids), len(b.response_ids)))
    return long / short


def _completions(rows: Sequence[_Row]) -> dict[str, Any]:
    return {
        "prompt": [row.prompt for row in rows],
        "completion": [row.response for row in rows],
        "reward": pa.array([row.reward for row in rows], pa.float64()),
        "prompt_input_ids": _ids([row.prompt_ids for row in rows]),
        "completion_input_ids": _ids([row.response_ids for row in rows]),
        "group_id": [row.group for row in rows],
        "id": [row.id for row in rows],
    }


def _ids(rows: Sequence[NDArray[Any]]) -> pa.ListArray:
    lengths = np.array([len(row) for row in rows], np.int64)
    return flat.lists(np.concatenate([np.zeros(0, np.int32), *rows]), lengths)


def _made(
    kind: str, columns: dict[str, Any], dropped: Counter[str], source: Any, options: dict[str, Any]
) -> PreferenceSet:
    left_out = dict(+dropped)
    said = {
        "kind": kind,
        "source": "table" if isinstance(source, pa.Table) else repr(source),
        "snapshot": getattr(source, "snapshot", None),
        **options,
        "dropped": left_out,
    }
    text = ("prompt", "chosen", "rejected", "completion", "group_id", "chosen_id", "rejected_id", "id")
    arrays = {n: pa.array(c, pa.string()) if n in text else c for n, c in columns.items()}
    return PreferenceSet(pa.table(arrays, metadata={METADATA_KEY: json.dumps(said)}), left_out)
