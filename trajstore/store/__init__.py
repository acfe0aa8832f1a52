"""Owns the table on disk: the handle, its scans, its side tables, its commit log and its files."""

from trajstore.store.scan import Scan
from trajstore.store.store import Commit, TrajectoryStore
from trajstore.store.table import Snapshot, is_store

__all__ = ["Commit", "Scan", "Snapshot", "TrajectoryStore", "is_store"]
