"""Owns making items ahead of their consumer, in a thread; knows not what they are."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """The items of an iterator, up to `depth` of them made before they are asked for.

    At most `depth` items wait, one more is being made and one is with the consumer, so memory that is used
    again in turns needs `depth + 2` places. What the iterator raises reaches the consumer in its turn,
    after the items before it. The thread ends with the items, with `close`, when this object is
    forgotten, or when the program ends.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._shared: _Shared[T] = _Shared(depth)
        # The thread must not know this object, or it would never be forgotten.
        thread = threading.Thread(
            target=_make, args=(items, self._shared), name="trajstore-loader", daemon=True
        )
        self._end = weakref.finalize(self, _stop, self._shared, thread)
        thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.waiting or shared.ended)
            if shared.waiting:
                item = shared.waiting.popleft()
                shared.changed.notify_all()
                return item
            error, shared.error = shared.error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread, waiting for the item it makes."""
        self._end()


class _Shared(Generic[T]):
    """What the thread and the consumer both see; `changed` guards it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.changed = threading.Condition()
        self.waiting: deque[T] = deque()
        self.ended = False  # no more items come
        self.error: BaseException | None = None


def _make(items: Iterator[T], shared: _Shared[T]) -> None:
    error = None
    try:
        for item in items:
            with shared.changed:
                shared.changed.wait_for(lambda: len(shared.waiting) < shared.depth or shared.ended)
                if shared.ended:
                    return
                shared.waiting.append(item)
                shared.changed.notify_all()
            del item  # or it would live as long as the next one is being made
    except BaseException as raised:
        error = raised
    finally:
        with shared.changed:
            shared.ended, shared.error = True, error
            shared.changed.notify_all()


def _stop(shared: _Shared[T], thread: threading.Thread) -> None:
    with shared.changed:
        shared.ended = True
        shared.waiting.clear()
        shared.changed.notify_all()
    if thread is not threading.current_thread() and thread.ident is not None:
        thread.join()
