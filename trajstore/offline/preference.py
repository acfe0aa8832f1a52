"""Owns preference pairs, KTO and step labels and filtered SFT sets from rewarded rows; trains nothing.

Column names are TRL's (its guide "dataset formats"); rows with chat messages give its conversational form.
What is left out is counted by reason, and a set says where it comes from: the query, the snapshot and these
counts in its metadata, the ids of its rows in columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from trajstore.offline.answers import Answer, Form, answers, column, groups
from trajstore.offline.flat import ArrowSource
from trajstore.offline.ilql_set import METADATA_KEY
from trajstore.offline.transitions import to_transitions
from trajstore.store.aside import sweep_aside, workplace
from trajstore.store.disk import sync

Pairing = Literal["best_worst", "all"]

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
        """Writes Parquet, or JSON lines when the name ends with .jsonl; what was there is replaced at once.

        JSON lines have no metadata: their provenance lies beside them, for `pairs.jsonl` in
        `.pairs.jsonl.meta.json`. The name is hidden since `datasets`, given the folder, would take any other
        file for rows.

        Raises:
            InputError: the name ends with neither .parquet nor .jsonl.
        """
        path = Path(path)
        said = self.table.schema.metadata[METADATA_KEY].decode()
        if path.suffix == ".parquet":
            with _replacing(path) as aside:
                pq.write_table(self.table, aside)
        elif path.suffix == ".jsonl":
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self.table.to_pylist())
            beside = path.with_name(f".{path.name}.meta.json")
            with _replacing(path) as aside, _replacing(beside) as aside_too:
                aside.write_text("".join(lines), encoding="utf-8", newline="\n")
                aside_too.write_text(said + "\n", encoding="utf-8", newline="\n")
        else:
            raise InputError(f"{path.name} ends with neither .parquet nor .jsonl")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that takes its name when it is whole and durable; nothing is left otherwise."""
    sweep_aside(path)
    with workplace(path) as aside:
        yield aside
        sync(aside)
        aside.replace(path)
        sync(path.parent)


def preference_pairs(
    source: ArrowSource | pa.Table,
    *,
    pairing: Pairing = "best_worst",
    margin: float = 0.0,
    max_length: int | None = None,
    length_ratio: float | None = None,
    form: Form | None = None,
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
        form: "text" gives strings (null where a row has tokens only), "messages" lists of chat messages;
            None = "messages" when every row has them. The response is all that came after the prompt, of
            several turns too: answers to one prompt differ from the first of them on. The environment's
            messages between them are in it, for the trainer's chat template to mask.

    Raises:
        InputError: an option is unknown or out of range.
    """
    if pairing not in get_args(Pairing):
        raise InputError(f"pairing is {pairing!r}, expected one of {', '.join(get_args(Pairing))}")
    ranges = (("margin", margin, 0), ("length_ratio", length_ratio, 1), ("max_length", max_length, 1))
    for name, value, least in ranges:
        if value is not None and not value >= least:
            raise InputError(f"{name} is {value}, expected at least {least}")
    found = answers(source, form=form, grouped=True)
    dropped = found.dropped
    pairs: list[tuple[Answer, Answer]] = []
    for members in groups(found):
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
        "prompt": column([good.prompt for good, _ in pairs], found.form),
        "chosen": column([good.response for good, _ in pairs], found.form),
        "rejected": column([bad.response for _, bad in pairs], found.form),
        "score_chosen": pa.array([good.reward for good, _ in pairs], pa.float64()),
        "score_rejected": pa.array([bad.reward for _, bad in pairs], pa.float64()),
        "prompt_input_ids": _ids([good.prompt_ids for good, _ in pairs]),
        "chosen_input_ids": _ids([good.response_ids for good, _ in pairs]),
        "rejected_input_ids": _ids([bad.response_ids for _, bad in pairs]),
        "group_id": [good.group for good, _ in pairs],
        "chosen_id": [good.id for good, _ in pairs],
        "rejected_id": [bad.id for _, bad in pairs],
    }
    said = {
        "pairing": pairing,
        "margin": margin,
        "max_length": max_length,
        "length_ratio": length_ratio,
        "form": found.form,
    }
    return _made("dpo", columns, dropped, source, said)


def kto_labels(
    source: ArrowSource | pa.Table,
    *,
    desirable: float,
    undesirable: float | None = None,
    form: Form | None = None,
) -> PreferenceSet:
    """Unpaired labels for KTO: true from a reward of `desirable` on, false below `undesirable`.

    Args:
        undesirable: None = the same threshold; what lies between the two is left out.
        form: as in `preference_pairs`.

    Raises:
        InputError: `undesirable` is above `desirable`.
    """
    low = desirable if undesirable is None else undesirable
    if low > desirable:
        raise InputError(f"undesirable is {low}, expected at most desirable, {desirable}")
    found = answers(source, form=form, grouped=False)
    kept = [row for row in found.rows if row.reward >= desirable or row.reward < low]
    found.dropped[BETWEEN] += len(found.rows) - len(kept)
    columns = _completions(kept, found.form) | {
        "label": pa.array([row.reward >= desirable for row in kept], pa.bool_())
    }
    said = {"desirable": desirable, "undesirable": low, "form": found.form}
    return _made("kto", columns, found.dropped, source, said)


def sft_rows(
    source: ArrowSource | pa.Table,
    *,
    min_reward: float | None = None,
    top: float | None = None,
    form: Form | None = None,
) -> PreferenceSet:
    """Rows worth imitating (rejection sampling): above a reward, or the best part of each group.

    Args:
        min_reward: rows with at least this reward.
        top: 0 to 1, the part of each group that stays: at least one row, the first of equal ones. Equal
            responses of a group count once.
        form: as in `preference_pairs`.

    Raises:
        InputError: neither is given, or `top` is out of range.
    """
    if min_reward is None and top is None:
        raise InputError("give min_reward or top", hint="top=0.2 keeps the best fifth of each group")
    if top is not None and not 0 < top <= 1:
        raise InputError(f"top is {top}, expected above 0 and at most 1")
    found = answers(source, form=form, grouped=top is not None)
    kept, dropped = found.rows, found.dropped
    if top is not None:
        kept = []
        for members in groups(found):
            best = sorted(members, key=lambda row: -row.reward)[: max(1, int(top * len(members)))]
            dropped[LOW] += len(members) - len(best)
            kept += best
    if min_reward is not None:
        above = [row for row in kept if row.reward >= min_reward]
        dropped[LOW] += len(kept) - len(above)
        kept = above
    said = {"min_reward": min_reward, "top": top, "form": found.form}
    return _made("sft", _completions(kept, found.form), dropped, source, said)


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


def _candidates(members: Sequence[Answer], pairing: Pairing) -> list[tuple[Answer, Answer]]:
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


def _distance(pair: tuple[Answer, Answer]) -> int:
    return abs(pair[0].length - pair[1].length)


def _ratio(a: Answer, b: Answer) -> float:
    short, long = sorted((a.length, b.length))
    return long / short


def _completions(rows: Sequence[Answer], form: Form) -> dict[str, Any]:
    return {
        "prompt": column([row.prompt for row in rows], form),
        "completion": column([row.response for row in rows], form),
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
    # What is still a list of Python's is text: empty sets keep the type of their columns.
    arrays = {n: pa.array(c, pa.string()) if isinstance(c, list) else c for n, c in columns.items()}
    return PreferenceSet(pa.table(arrays, metadata={METADATA_KEY: json.dumps(said)}), left_out)
