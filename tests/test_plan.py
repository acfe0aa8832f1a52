"""Every row once, in an order that keys alone decide."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import InputError, plan
from trajstore.selection import seeded_keys

lengths_of_rows = st.lists(st.integers(0, 9), max_size=40)
sizes = st.integers(1, 7)
windows = st.none() | st.integers(1, 4)


def arrays(lengths: list[int], seed: int = 0) -> tuple[plan.Int64s, np.ndarray]:
    return np.array(lengths, np.int64), seeded_keys(np.arange(len(lengths)), seed)


@settings(max_examples=100, deadline=None)
@given(lengths_of_rows, sizes, windows, st.booleans())
def test_every_row_is_in_exactly_one_batch(
    lengths: list[int], size: int, window: int | None, shuffled: bool
) -> None:
    array, keys = arrays(lengths)
    batches = plan.batches(array, size, keys=keys if shuffled else None, bucket_window=window)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(lengths)))
    assert len(batches) == -(-len(lengths) // size)
    assert sorted(map(len, batches), reverse=True)[:-1] == [size] * (len(batches) - 1 if batches else 0)


@settings(max_examples=100, deadline=None)
@given(lengths_of_rows, sizes, windows, st.randoms(use_true_random=False), st.integers(0, 5))
def test_batches_hold_the_same_rows_whatever_their_order(
    lengths: list[int], size: int, window: int | None, random: st.DataObject, seed: int
) -> None:
    """Lengths repeat inside every window, so ties are broken by key and not by place."""
    array, keys = arrays(lengths, seed)
    moved = list(range(len(lengths)))
    random.shuffle(moved)  # type: ignore[attr-defined]  # a random.Random
    order = np.array(moved, np.int64)
    plain = plan.batches(array, size, keys=keys, bucket_window=window)
    permuted = plan.batches(array[order], size, keys=keys[order], bucket_window=window)
    assert [order[batch].tolist() for batch in permuted] == [batch.tolist() for batch in plain]


def test_without_keys_rows_go_as_they_come() -> None:
    batches = plan.batches(np.array([5, 1, 4, 2, 3]), 2)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def test_a_window_is_cut_by_length() -> None:
    batches = plan.batches(np.array([5, 1, 4, 2, 9, 7, 8, 6]), 2, bucket_window=2)
    assert [batch.tolist() for batch in batches] == [[1, 3], [2, 0], [7, 5], [6, 4]]


def test_batches_of_a_window_are_shuffled_too() -> None:
    lengths, keys = arrays(list(range(400)))
    first = [int(lengths[batch].max()) for batch in plan.batches(lengths, 4, keys=keys, bucket_window=100)]
    assert first != sorted(first)
    assert sorted(first) == list(range(3, 400, 4))


def test_keys_shuffle_and_another_seed_shuffles_otherwise() -> None:
    lengths = np.ones(50, np.int64)
    orders = [
        np.concatenate(plan.batches(lengths, 8, keys=seeded_keys(np.arange(50), seed))).tolist()
        for seed in range(4)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert all(order != list(range(50)) for order in orders)


def test_every_place_is_as_likely_for_every_row() -> None:
    """Chi-square of row by place over 3,000 seeds, 5 sigma."""
    count, seeds = 12, 3000
    seen = np.zeros((count, count))
    for seed in range(seeds):
        order = np.concatenate(
            plan.batches(np.ones(count, np.int64), 5, keys=seeded_keys(np.arange(count), seed))
        )
        seen[order, np.arange(count)] += 1
    expected = seeds / count
    chi_square = ((seen - expected) ** 2 / expected).sum()
    freedom = (count - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_bucket_windows_lower_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 2000)
    keys = seeded_keys(np.arange(2000), 0)
    ratios = [
        plan.padding_ratio(lengths, plan.batches(lengths, 16, keys=keys, bucket_window=window))
        for window in (None, 1, 4, 16)
    ]
    assert ratios[0] == pytest.approx(ratios[1])  # a window of one batch changes nothing
    assert ratios[1] > 2 * ratios[2] > 4 * ratios[3] > 0


def test_padding_ratio_of_a_plan() -> None:
    lengths = np.array([4, 2, 3, 0])
    assert plan.padding_ratio(lengths, [np.array([0, 1]), np.array([2, 3])]) == 1 - 9 / 14
    assert plan.padding_ratio(lengths, []) == 0
    assert plan.padding_ratio(np.zeros(2, np.int64), [np.array([0, 1])]) == 0


@pytest.mark.parametrize(
    ("size", "window", "name"), [(0, None, "batch_size"), (-1, 2, "batch_size"), (1, 0, "bucket_window")]
)
def test_sizes_below_one_are_refused(size: int, window: int | None, name: str) -> None:
    with pytest.raises(
        InputError, match=rf"{name} is {size if name == 'batch_size' else window}, expected at least 1"
    ):
        plan.batches(np.ones(3, np.int64), size, bucket_window=window)
