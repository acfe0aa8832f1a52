"""Owns loggers for running trainers: arrays of a loop → store or buffer. TRL's is `trajstore.hooks.trl`."""

from trajstore.hooks.logger import TrajectoryLogger

__all__ = ["TrajectoryLogger"]
