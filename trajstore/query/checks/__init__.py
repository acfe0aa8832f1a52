"""Owns what the doctor looks for: one pure function a check, survey in, findings out; reads nothing.

To add one: a function in rows.py or runs.py, its name in that module's CHECKS, and a test with a store that
has the fault and one that has not.
"""

from trajstore.query.checks import rows, runs
from trajstore.query.checks.finding import LEVELS, Check, Finding, Level

CHECKS: tuple[Check, ...] = (*rows.CHECKS, *runs.CHECKS)

__all__ = ["CHECKS", "LEVELS", "Check", "Finding", "Level"]
