"""Items made ahead: in order, bounded, with their errors, and no thread left behind."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from trajstore.loader.ahead import Ahead


def threads() -> int:
    return sum(thread.name == "trajstore-loader" for thread in threading.enumerate())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_come_in_order_and_then_the_end(depth: int) -> None:
    ahead = Ahead(iter(range(50)), depth)
    assert list(ahead) == list(range(50))
    assert list(ahead) == []
    until(lambda: threads() == 0)


def test_no_more_than_depth_wait() -> None:
    made = []

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    ahead = Ahead(items(), 3)
    until(lambda: len(made) == 4)  # three wait, one more is made
    assert [next(ahead), next(ahead)] == [0, 1]
    until(lambda: len(made) == 6)
    time.sleep(0.02)
    assert len(made) == 6
    ahead.close()
    assert threads() == 0


def test_an_error_comes_in_its_turn() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("of the third")

    ahead = Ahead(items(), 5)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ValueError, match="of the third") as raised:
        next(ahead)
    assert "items" in [entry.name for entry in raised.traceback], "it says where it happened"
    assert list(ahead) == []


def test_closing_early_or_forgetting_it_ends_the_thread() -> None:
    first, second = Ahead(iter(range(10**9)), 2), Ahead(iter(range(10**9)), 2)
    next(first)
    first.close()
    first.close()
    assert list(first) == []
    del second
    gc.collect()
    assert threads() == 0


def test_an_item_that_was_taken_is_not_kept() -> None:
    class Item:
        pass

    ahead = Ahead((Item() for _ in range(3)), 1)
    item = next(ahead)
    gone = weakref.ref(item)
    until(lambda: len(ahead._shared.waiting) == 1)
    del item
    assert gone() is None
    ahead.close()


def test_a_program_may_end_in_the_middle() -> None:
    script = (
        "import itertools; from trajstore.loader.ahead import Ahead\n"
        "ahead = Ahead(itertools.count(), 2); print(next(ahead))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
