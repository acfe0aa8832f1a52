"""Owns batches for training: the loop over a plan; needs torch, which is why it is not imported by default."""

from trajstore.loader.loader import TrajectoryLoader

__all__ = ["TrajectoryLoader"]
