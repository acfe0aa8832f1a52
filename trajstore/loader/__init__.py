"""Owns batches for training: the loop over a plan; needs torch, so it is not imported by default."""

from trajstore.loader.loader import TrajectoryLoader
from trajstore.loader.sources import ArrowRows
from trajstore.loader.stats import Stats

__all__ = ["ArrowRows", "Stats", "TrajectoryLoader"]
