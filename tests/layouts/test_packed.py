"""The packed and nested layouts: against the reference, and attention over them against attention over padded."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.layouts.reference import (
    Row,
    any_options,
    batch_rows,
    dtype_of,
    fill_of,
    kept,
    row,
    rows_of,
    same,
    up,
)
from trajstore import InputError
from trajstore.layouts import Options, Rows, nested, packed, padded, to_nested, to_torch


@settings(max_examples=80, deadline=None)
@given(batch_rows, st.integers(0, 5), any_options)
def test_a_packed_batch_is_what_the_design_says(rows: list[Row], cut: int, options: Options) -> None:
    batch = packed(rows_of(*rows, cut=cut), options)
    out = batch.arrays
    sizes = [len(kept(one, "input_ids", options)) for one in rows]
    total = up(sum(sizes), options.pad_to_multiple_of)
    spare = total - sum(sizes)
    for name in batch.columns:
        expected: list[float] = []
        for one in rows:
            values = list(map(float, range(one["length"]))) if name == "position_ids" else None
            values = (
                kept(one, name, options) if values is None else values[: len(kept(one, "tokens", options))]
            )
            if name == "loss_mask" and values:
                values = [0, *values[1:]]
            expected += values
        same(out, name, expected + [fill_of(name, options)] * spare, dtype_of(name, options))
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    if options.pad_to_multiple_of > 1:
        ends.append(total)
        sizes.append(spare)
    same(out, "cu_seqlens", ends, np.int32)
    assert out["max_seqlen"] == max(sizes, default=0)
    assert type(out["max_seqlen"]) is int
    assert (batch.size, batch.num_tokens) == (total, total - spare)


ROWS = [
    row(id=str(i), length=n, tokens=list(range(n)), prompt_length=min(n, 2), advantages=[float(i)] * n)
    for i, n in enumerate([5, 1, 8, 3, 0, 6])
]
HEADS, WIDTH = 2, 4


def embedded(ids: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of ids of any shape: [3, ..., HEADS, WIDTH]."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3, 16, HEADS, WIDTH, generator=generator)
    return table[:, ids]


def over_padded(rows: Rows) -> list[torch.Tensor]:
    """Causal attention over the padded batch; the outputs of each row's own tokens."""
    tensors = to_torch(padded(rows).arrays)
    q, k, v = embedded(tensors["input_ids"]).transpose(2, 3)
    width = q.shape[-2]
    seen = torch.ones(width, width).tril().bool() & tensors["attention_mask"].bool()[:, None, None, :]
    out = sdpa(q, k, v, attn_mask=seen | torch.eye(width).bool()).transpose(1, 2)
    return [out[i, : int(n)] for i, n in enumerate(rows.lengths)]


def test_attention_within_cu_seqlens_equals_attention_over_padded() -> None:
    """The rule of flash_attn_varlen and flex_attention: a token sees the tokens of its own row before it."""
    rows = rows_of(*ROWS)
    tensors = to_torch(packed(rows, Options(pad_to_multiple_of=8)).arrays)
    bounds = tensors["cu_seqlens"]
    row_of = torch.searchsorted(bounds, torch.arange(len(tensors["input_ids"])), right=True)
    seen = (row_of[:, None] == row_of) & (tensors["position_ids"][:, None] >= tensors["position_ids"])
    q, k, v = embedded(tensors["input_ids"]).transpose(1, 2)
    out = sdpa(q, k, v, attn_mask=seen).transpose(0, 1)
    for i, expected in enumerate(over_padded(rows)):
        torch.testing.assert_close(out[bounds[i] : bounds[i + 1]], expected)
    assert int(bounds.diff().max()) == tensors["max_seqlen"]


def test_flex_attention_over_packed_equals_attention_over_padded() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = rows_of(*ROWS)
    tensors = to_torch(packed(rows).arrays)
    bounds = tensors["cu_seqlens"]
    total = len(tensors["input_ids"])
    row_of = torch.searchsorted(bounds, torch.arange(total), right=True)

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (row_of[q] == row_of[k]) & (q >= k)

    mask = create_block_mask(seen, None, None, total, total, device="cpu")
    q, k, v = embedded(tensors["input_ids"]).transpose(1, 2)[:, None]
    with pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        out = flex_attention(q, k, v, block_mask=mask)[0].transpose(0, 1)
    for i, expected in enumerate(over_padded(rows)):
        torch.testing.assert_close(out[bounds[i] : bounds[i + 1]], expected)


def test_attention_over_nested_equals_attention_over_padded() -> None:
    rows = rows_of(*(one for one in ROWS if one["length"]))
    batch = nested(rows)
    tensors = to_nested(to_torch(batch.arrays), batch.columns)
    ids = tensors["input_ids"]
    assert (ids.is_nested, ids.layout) == (True, torch.jagged)
    flat = embedded(ids.values())
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(part, offsets=ids.offsets()).transpose(1, 2) for part in flat
    )
    out = sdpa(q, k, v, is_causal=True).transpose(1, 2)
    for mine, expected in zip(out.unbind(), over_padded(rows), strict=True):
        torch.testing.assert_close(mine, expected)


def test_nested_tensors_are_the_packed_memory_and_of_one_shape() -> None:
    batch = nested(rows_of(*ROWS))
    flat = to_torch(batch.arrays)
    tensors = to_nested(flat, batch.columns)
    for name in batch.columns:
        assert tensors[name].values().data_ptr() == flat[name].data_ptr()
        assert [len(part) for part in tensors[name].unbind()] == [5, 1, 8, 3, 0, 6]
    assert tensors["rewards"].tolist() == [0.5] * 6
    product = tensors["loss_mask"] * tensors["advantages"]  # torch refuses tensors of two offsets
    assert product.unbind()[2].tolist() == [0, 0, 2, 2, 2, 2, 2, 2]


def test_nested_has_no_padding() -> None:
    with pytest.raises(InputError, match="pad_to_multiple_of has no meaning in the nested layout"):
        nested(rows_of(*ROWS), Options(pad_to_multiple_of=8))


def test_the_first_token_of_a_row_trains_nothing_when_packed() -> None:
    masks = {"loss_mask": [1, 1, 1]}
    rows = rows_of(row(**masks), row(length=0, tokens=[], prompt_length=0), row(**masks))
    assert packed(rows).arrays["loss_mask"].tolist() == [0, 1, 1, 0, 1, 1]
    assert packed(rows, Options(max_length=2, truncation_side="left")).arrays["loss_mask"].tolist() == [
        0,
        1,
        0,
        1,
    ]
    assert padded(rows).arrays["loss_mask"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
