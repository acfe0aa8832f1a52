"""The accounting agrees with the batches it is of."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loader.test_loader import ROWS, store_of
from trajstore import TrajectoryBatch
from trajstore.loader import TrajectoryLoader
from trajstore.loader.stats import Stats


@pytest.mark.parametrize("layout", ["padded", "packed", "prompt_response"])
def test_totals_are_the_sum_of_the_batches(layout: Any) -> None:
    loader = TrajectoryLoader(TrajectoryBatch(ROWS), batch_size=7, layout=layout, max_length=6, prefetch=0)
    total = Stats()
    for batch in loader:
        last = loader.last_stats()
        assert last.batches == 1
        assert last.rows == len(batch["ids"])
        assert last.tokens == batch["num_tokens"]
        assert last.cut_tokens == batch["cut_tokens"]
        assert last.padding_ratio == pytest.approx(batch["padding_ratio"])
        assert last.size == batch["input_ids"].numel()
        assert last.bytes_moved <= sum(t.nbytes for t in batch.values() if isinstance(t, torch.Tensor))
        assert last.wait_seconds > 0
        total += last
    assert loader.stats() == total
    lengths = [len(row.tokens) or len(row.prompt_tokens) + len(row.response_tokens) for row in ROWS]
    assert total.tokens + total.cut_tokens == sum(lengths)
    assert total.cut_rows == sum(length > 6 for length in lengths)
    line = str(loader.stats())
    assert "\n" not in line
    assert f"{total.tokens:,} tokens" in line
    assert f"{total.cut_tokens:,} tokens of {total.cut_rows:,} rows cut off" in line


def test_cache_hits_are_counted(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", ROWS[:9], ROWS[9:])
    used = []
    for _ in range(2):
        loader = TrajectoryLoader(store.scan(), batch_size=40)
        list(loader)
        list(loader)
        used.append((loader.stats().cache_hits, loader.stats().cache_decoded))
    columns = used[0][1]
    assert columns > 14
    assert used == [(0, columns), (columns, 0)]
    assert loader.stats().batches == 2
