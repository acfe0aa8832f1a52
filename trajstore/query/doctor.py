"""Owns the examination of stored rows: every check over one survey, worst findings first; repairs nothing.

`fsck` asks whether the bytes are what was written; the doctor asks whether one should train on them.
"""

from __future__ import annotations

from trajstore.query.checks import CHECKS, LEVELS, Finding
from trajstore.query.survey import Source, Survey, survey
from trajstore.trajectory import PolicyVersion


def doctor(source: Source, *, at: PolicyVersion | int | None = None, by: str = "source") -> list[Finding]:
    """What one should know before training on these rows.

    Args:
        source: a store, a scan of it, or a batch in memory.
        at: the current policy version; the newest one in the rows unless given.
        by: what a task is: a scalar column, or `metadata.KEY`.

    Returns:
        Findings, errors first, then warnings, then notes; within a level those of most rows first.

    Raises:
        QueryError: `by` is not a scalar column.
        CorruptFileError: a data file cannot be read.
    """
    return examine(survey(source, at=at, by=by))


def examine(rows: Survey) -> list[Finding]:
    """The same of rows that have been surveyed."""
    found = [finding for check in CHECKS for finding in check(rows)]
    return sorted(found, key=lambda f: (LEVELS.index(f.level), -f.rows))
