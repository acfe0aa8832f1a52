"""Owns every error trajstore raises on purpose; knows nothing else of the package.

The tree, grouped by what a handler would do next::

    TrajstoreError
    ├── InputError                 the caller's data or arguments are wrong: fix them, try again
    │   ├── ValidationError        a value of a row breaks the contract
    │   │   └── LengthMismatchError    a per-token list is not as long as `tokens`
    │   ├── SchemaError            columns or types are not the store's
    │   │   └── FormatVersionError     the store was written by a newer trajstore
    │   ├── ImportFormatError      a file is not what its format says
    │   ├── QueryError             a predicate, SQL text or sampling request cannot be run
    │   ├── StoreNotFoundError     no store there
    │   └── StoreExistsError       a store or another thing is already there
    ├── StorageError               the disk or the object store refused: make room or get access
    │   └── UncertainCommitError   whether a commit got through is not known: look, or send it again
    ├── ConflictError              another writer was first: read again, then decide
    └── CorruptFileError           bytes on disk are damaged: restore or repair

Each class also inherits the built-in it specialises, so `except ValueError` keeps working, and all of
them pickle (they cross process borders in loaders and Ray).
"""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""What libraries put into the messages that ours quote, and what no log or pipe wants."""


class TrajstoreError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what was found, where, and what was expected.
        hint: the next step, shown on its own line by the CLI.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = _COLOURS.sub("", message)
        super().__init__(self.message)
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only state is restored through __dict__; Exception's own __reduce__ would lose it.
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(cls: type[TrajstoreError], message: str, state: dict[str, object]) -> TrajstoreError:
    error = cls(message)  # every subclass takes its message first; __new__ alone refuses OSError's children
    error.__dict__.update(state)
    return error


class InputError(TrajstoreError, ValueError):
    """The caller's data or arguments are wrong."""


class ValidationError(InputError):
    """A value of a row breaks the contract of the row (DESIGN §3).

    Attributes:
        row: position of the trajectory in what was given, or None.
        id: the trajectory's id, "" when it has none.
        column: the column at fault, or None.
        reason: the message without the row's name in front.
    """

    def __init__(
        self,
        reason: str,
        *,
        row: int | None = None,
        id: str = "",
        column: str | None = None,
        hint: str | None = None,
    ) -> None:
        where = []
        if row is not None:
            where.append(f"trajectory {row}" + (f" (id {id!r})" if id else ""))
        elif id:
            where.append(f"trajectory {id!r}")
        if column is not None:
            where.append(f"column {column!r}")
        super().__init__(f"{', '.join(where)}: {reason}" if where else reason, hint=hint)
        self.reason = reason
        self.row = row
        self.id = id
        self.column = column

    def moved(self, offset: int) -> ValidationError:
        """The same error for a caller who counts rows from `offset` earlier."""
        row = None if self.row is None else self.row + offset
        error = type(self)(self.reason, row=row, id=self.id, column=self.column, hint=self.hint)
        return error.with_traceback(self.__traceback__)


class LengthMismatchError(ValidationError):
    """A per-token list is neither as long as `tokens` nor as long as the response."""


class SchemaError(InputError, TypeError):
    """Columns or types are not the store's."""


class FormatVersionError(SchemaError):
    """The store was written in a newer format than this program knows."""


class ImportFormatError(InputError):
    """A file is not what its format says; names the file and the line or record."""


class QueryError(InputError):
    """A predicate, an SQL text or a sampling request cannot be run."""


class StoreNotFoundError(InputError, FileNotFoundError):
    """There is no store at the path."""

    __str__ = TrajstoreError.__str__


class StoreExistsError(InputError, FileExistsError):
    """There already is something at the path."""

    __str__ = TrajstoreError.__str__


class ConflictError(TrajstoreError, RuntimeError):
    """Another writer committed first, or a writer's batches come out of order."""


class StorageError(TrajstoreError, OSError):
    """The disk or the object store refused a write; nothing was committed."""

    __str__ = TrajstoreError.__str__


class UncertainCommitError(StorageError):
    """The object store or the disk failed while it committed: the commit may be in the log, now or soon.

    An append with a `writer_id` and a `batch_no` can be sent again as it is: it never comes in twice.
    """


def is_refusal(error: BaseException) -> bool:
    """Whether a commit that ended so is certainly not in the log: its files can go then."""
    return isinstance(error, TrajstoreError) and not isinstance(error, UncertainCommitError)


class CorruptFileError(TrajstoreError, OSError):
    """Bytes on disk are damaged or missing; names the file."""

    __str__ = TrajstoreError.__str__
