"""Owns trlX's rollout logs, `epoch-*.json`: padded queries and responses; the file does not name the pad id.

The pad id is the value of the longest runs at the ends of responses and the beginnings of queries; metadata
names it. When the pad is also the end token, a response's own end cannot be told from padding and goes too.
Values are as long as the response and up to two more; the score is added to the last of them, so what is
behind the response is added to its last token. The rewards hold the KL penalty: the bare score is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.errors import ImportFormatError
from trajstore.importers.head import Format, told_by
from trajstore.importers.records import Imported, ImportOptions, Record, read_records
from trajstore.importers.rows import NOT_KNOWN, Origin, convert, grouped, rest
from trajstore.trajectory import Trajectory, TrajectoryStatus


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """The elements of one epoch's file."""
    origin = Origin.of("trlx", path, options)
    records: list[Record] = list(read_records(path, options))
    pad = _pad_id(path, records)

    def build(data: Any, number: int) -> list[Trajectory]:
        query, response = list(data["query_tensor"]), list(data["response_tensor"])
        start = next((i for i, token in enumerate(query) if token != pad), len(query))
        end = next((i for i in range(len(response), 0, -1) if response[i - 1] != pad), 0)
        query, response = query[start:], response[:end]
        rewards = data.get("rewards")
        group, how = grouped(origin, query, options)
        used = ("query_tensor", "response_tensor", "logprobs", "values", "rewards")
        return [
            Trajectory(
                id=origin.id(number),
                group_id=group,
                prompt_tokens=query,
                response_tokens=response,
                behavior_log_probs=_cut(data.get("logprobs"), end),
                values=_cut(data.get("values"), end),
                token_rewards=[] if rewards is None else _folded(rewards, end),
                reward=NOT_KNOWN if rewards is None else float(np.sum(rewards)),
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(
                    data, *used, pad_id=pad, group_by=how, reward_is=rewards and "score less KL penalty"
                ),
                source=origin.source,
            )
        ]

    yield from convert(records, origin, options, build)


def _pad_id(path: Path, records: Sequence[Record]) -> int | None:
    """The value whose run at the padded ends is longest in sum; None when nothing is repeated there."""
    runs: Counter[int] = Counter()
    for record in records:
        data = record.data
        if not isinstance(data, dict):
            continue
        for name, step in (("response_tensor", -1), ("query_tensor", 1)):
            values = data.get(name)
            if not isinstance(values, list) or not values:
                continue
            if not isinstance(values[0], int):
                raise ImportFormatError(
                    f"{record.where}: {name!r} is not a list of ids", hint="give the tokenized elements"
                )
            ordered = values[::step]
            run = next((i for i, token in enumerate(ordered) if token != ordered[0]), len(ordered))
            if run > 1:
                runs[ordered[0]] += run
    return runs.most_common(1)[0][0] if runs else None


def _cut(values: Any, length: int) -> Any:
    if values is None:
        return []
    if len(values) < length:
        raise ValueError(f"it has {len(values)} values for {length} tokens of response")
    return values[:length]


def _folded(values: Sequence[float], length: int) -> Any:
    """Values of the response; what is behind it is added to its last."""
    out = np.asarray(_cut(values, length), np.float64).copy()
    if length:
        out[-1] += sum(values[length:])
    return out.astype(np.float32)


FORMATS = (Format("trlx", told_by("json", "query_tensor", "response_tensor"), read),)
