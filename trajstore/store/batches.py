"""Owns which batch of a writer may come next, and the name its number has in the log; knows no log."""

from __future__ import annotations

from trajstore.errors import ConflictError


def application(writer_id: str, epoch: int) -> str:
    """The Delta application whose transaction holds a writer's last batch number in an epoch."""
    return writer_id if epoch == 0 else f"{writer_id}@{epoch}"


def is_known(last: int | None, writer_id: str, batch_no: int, *, resent: bool) -> bool:
    """Whether a batch was committed before.

    Args:
        last: the writer's last batch in the table, None when none is.
        writer_id, batch_no: the batch's.
        resent: whether the caller numbers the batches and may send one again; else the numbers are a
            handle's own, which go on over a restore and are nobody else's.

    Raises:
        ConflictError: the batch is not the writer's next, or another process writes under its name.
    """
    if last is not None and batch_no <= last:
        if not resent:
            raise ConflictError(
                f"another process writes as {writer_id!r}: its batch {batch_no} is in the store already",
                hint="give each process a writer_id of its own",
            )
        return True
    expected = 0 if last is None else last + 1
    if resent and batch_no != expected:
        raise ConflictError(
            f"batch {batch_no} of writer {writer_id!r} does not follow: the next one is {expected}",
            hint="number a writer's batches 0, 1, 2, ... and resend the missing one first",
        )
    return False
