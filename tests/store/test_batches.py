"""Which batch of a writer may come next."""

import pytest

from trajstore import ConflictError
from trajstore.store.batches import application, is_known


def test_numbers_of_a_caller_have_no_gaps_and_may_be_sent_again() -> None:
    assert [is_known(last, "w", n, resent=True) for last, n in ((None, 0), (0, 1), (4, 4), (4, 0))] == [
        *(False, False),
        *(True, True),
    ]
    for last, number, expected in ((None, 1, 0), (3, 5, 4)):
        with pytest.raises(ConflictError, match=f"the next one is {expected}"):
            is_known(last, "w", number, resent=True)


def test_numbers_of_a_handle_may_skip_and_are_never_sent_again() -> None:
    assert not any(is_known(last, "w", n, resent=False) for last, n in ((None, 0), (None, 3), (3, 7)))
    with pytest.raises(ConflictError, match="another process writes as 'w'"):
        is_known(3, "w", 3, resent=False)


def test_epochs_have_names_of_their_own() -> None:
    assert [application("w", epoch) for epoch in (0, 2)] == ["w", "w@2"]
