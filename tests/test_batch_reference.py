"""TrajectoryBatch against a slow reference written from the page: one row at a time, one token at a time."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import PolicyVersion, Trajectory, TrajectoryBatch
from trajstore.codec import encode

FLOATS = ("log_probs", "behavior_log_probs", "advantages", "returns")
PAD = 7


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Ragged, some columns missing, some lists as long as the response, some prompts or responses empty."""
    prompt, response = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    total = prompt + response
    numbers = st.floats(-9, 9, width=32)
    bits = st.integers(0, 1)

    def listed(values: st.SearchStrategy[Any], *sizes: int) -> list[Any]:
        size = draw(st.sampled_from([0, *sizes]))  # 0: not given
        return draw(st.lists(values, min_size=size, max_size=size))

    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total))
    said = {"tokens": tokens, "prompt_length": prompt, "response_length": response}
    apart = {"prompt_tokens": tokens[:prompt], "response_tokens": tokens[prompt:]}
    fields: dict[str, Any] = draw(st.sampled_from([said, apart, said | apart]))
    loss_mask = listed(bits, total, response)
    if len(loss_mask) == total:  # ones on the prompt beside lists as long as the response are refused
        loss_mask[:prompt] = [0] * prompt
    return Trajectory(
        **fields,
        loss_mask=loss_mask,
        attention_mask=listed(bits, total),
        **{name: listed(numbers, total, response) for name in FLOATS},
        reward=draw(st.floats(-9, 9, width=32) | st.just(math.nan)),
        version=draw(st.none() | st.integers(0, 99).map(PolicyVersion)),
    )


def row_tensor(t: Trajectory, name: str, tokens: list[int], prompt: int) -> list[float]:
    """One row of a tensor before it is padded, as the page and the design of this one say."""
    values = []
    missing = {"attention_mask": 1.0}.get(name, math.nan)
    for position in range(len(tokens)):
        given = tokens if name == "input_ids" else list(getattr(t, name))
        if not given:  # no list: the default of this position
            values.append(float(position >= prompt) if name == "loss_mask" else missing)
        elif len(given) == len(tokens):
            values.append(given[position])
        else:  # aligned with the response: nothing was sampled before it
            values.append(given[position - prompt] if position >= prompt else 0.0)
    return values


def reference(rows: list[Trajectory]) -> dict[str, list[Any]]:
    """The tensors of the page as nested lists."""
    split = [
        (list(t.tokens or [*t.prompt_tokens, *t.response_tokens]), t.prompt_length or len(t.prompt_tokens))
        for t in rows
    ]
    width = max((len(tokens) for tokens, _ in split), default=0)
    out: dict[str, list[Any]] = {}
    for name in ("input_ids", "attention_mask", "loss_mask", *FLOATS):
        fill = PAD if name == "input_ids" else 0
        out[name] = []
        for t, (tokens, prompt) in zip(rows, split, strict=True):
            values = row_tensor(t, name, tokens, prompt)
            while len(values) < width:
                values.append(fill)
            out[name].append(values)
    out["rewards"] = [t.reward for t in rows]
    out["versions"] = [-1 if t.version is None else t.version.version_id for t in rows]
    return out


def in_two_chunks(rows: list[Trajectory]) -> TrajectoryBatch:
    half = len(rows) // 2
    tables = [pa.Table.from_batches([encode(part)]) for part in (rows[:half], rows[half:])]
    return TrajectoryBatch.from_arrow(pa.concat_tables(tables))


@given(st.lists(trajectories(), max_size=6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_tensors_and_statistics_are_those_of_the_page(rows: list[Trajectory], chunked: bool) -> None:
    batch = in_two_chunks(rows) if chunked else TrajectoryBatch(trajectories=rows)
    expected = reference(rows)
    tensors = batch.to_tensors(device="cpu", pad_token_id=PAD)
    assert set(tensors) == set(expected)
    whole = ("input_ids", "attention_mask", "versions")
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.int64 if name in whole else torch.float32)
        shape = (len(rows),) if name in ("rewards", "versions") else np.shape(expected["input_ids"])
        assert tuple(tensor.shape) == (shape if rows else shape + (0,) * (tensor.ndim - len(shape)))
        values = np.array(expected[name]).reshape(tensor.shape)
        np.testing.assert_array_equal(tensor.numpy(), values, err_msg=name)

    lengths = [t.total_length for t in rows]
    padding = sum(max(lengths) - length for length in lengths)
    cells = len(lengths) * max(lengths, default=0)
    assert math.isclose(batch.compute_padding_ratio(), padding / cells if cells else 0.0, abs_tol=1e-12)
    assert (batch.batch_size, batch.max_length) == (len(rows), max(lengths, default=0))
    assert batch.num_tokens == sum(lengths)

    stats = batch.get_version_stats()
    known = [t.version.version_id for t in rows if t.version is not None]
    if not known:
        assert all(math.isnan(value) for value in stats.values())
        return
    assert math.isclose(stats.pop("mean_version"), sum(known) / len(known))
    low, high = min(known), max(known)
    assert stats == {"min_version": low, "max_version": high, "version_spread": high - low}
