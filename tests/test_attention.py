"""Attention over packed and nested batches is attention over padded ones: the proof of their conventions."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.layouts.reference import row, rows_of
from trajstore.layouts import Options, Rows, nested, packed, padded, to_nested, to_torch

ROWS = [
    row(id=str(i), length=n, tokens=list(range(n)), prompt_length=min(n, 2), advantages=[float(i)] * n)
    for i, n in enumerate([5, 1, 8, 3, 0, 6])
]
HEADS, WIDTH = 2, 8


def embedded(ids: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of ids of any shape: [3, ..., HEADS, WIDTH]."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3, 16, HEADS, WIDTH, generator=generator)
    return table[:, ids]


def over_padded(rows: Rows, causal: bool = True) -> list[torch.Tensor]:
    """Attention over the padded batch; the outputs of each row's own tokens."""
    tensors = to_torch(padded(rows).arrays)
    q, k, v = embedded(tensors["input_ids"]).transpose(2, 3)
    width = q.shape[-2]
    before = torch.ones(width, width).tril().bool() if causal else torch.ones(width, width).bool()
    seen = before & tensors["attention_mask"].bool()[:, None, None, :]
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


@pytest.mark.slow
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own way on the CPU
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
    out = sdpa(q, k, v).transpose(1, 2)  # torch has no causal form for jagged tensors on the CPU
    for mine, expected in zip(out.unbind(), over_padded(rows, causal=False), strict=True):
        torch.testing.assert_close(mine, expected)
