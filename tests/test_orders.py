"""Orders are those of numpy's own stable sorts, whatever ties there are."""

import numpy as np
import pytest

from trajstore.orders import by_key, in_order


@pytest.mark.parametrize("span", [3, 2**16, 2**40])
@pytest.mark.parametrize("count", [0, 1, 500])
def test_orders_are_those_of_stable_sorts(span: int, count: int) -> None:
    rng = np.random.default_rng(count)
    within, first = rng.integers(0, span, count), rng.integers(0, 7, count)
    assert in_order(within, first).tolist() == np.lexsort((within, first)).tolist()
    assert in_order(first, within).tolist() == np.lexsort((first, within)).tolist()
    keys = within.astype(np.uint64)
    assert by_key(keys).tolist() == np.argsort(keys, kind="stable").tolist()
