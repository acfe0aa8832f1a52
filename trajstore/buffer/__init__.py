"""Owns the buffer between rollouts and trainer; reaches a store only through the verbs it is given."""

from trajstore.buffer.buffer import TrajectoryBuffer

__all__ = ["TrajectoryBuffer"]
