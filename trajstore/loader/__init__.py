"""Owns batches for training: the loop over a plan; needs torch, so it is not imported by default."""

from trajstore.loader.loader import TrajectoryLoader

__all__ = ["TrajectoryLoader"]
