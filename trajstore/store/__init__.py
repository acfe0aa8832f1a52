"""Owns the table on disk: the handle, its scans, its side tables, its commit log and its files."""

from trajstore.store.append import Commit
from trajstore.store.datafile import Snapshot
from trajstore.store.place import Place
from trajstore.store.scan import Scan
from trajstore.store.store import TrajectoryStore

__all__ = ["Commit", "Place", "Scan", "Snapshot", "TrajectoryStore"]
