"""Owns asking: gates, samplers and SQL over a store or a scan; knows no tensors."""

from trajstore.query.expressions import Traj
from trajstore.query.sampling import informative_groups, max_times_sampled, stratified_sample
from trajstore.query.sql import Connection, connect
from trajstore.query.staleness import CONVENTIONS, Convention, fresh, mask_stale_tokens, trainable
from trajstore.selection import Fresh
from trajstore.selection.explain import Explanation, Gate, Share

__all__ = [
    "CONVENTIONS",
    "Connection",
    "Convention",
    "Explanation",
    "Fresh",
    "Gate",
    "Share",
    "Traj",
    "connect",
    "fresh",
    "informative_groups",
    "mask_stale_tokens",
    "max_times_sampled",
    "stratified_sample",
    "trainable",
]
