"""Owns choosing rows from scalar columns: version gaps, gates, strata, the seeded draw; pure, knows no store.

A step looks at a frame of scalar columns, one row a trajectory, and says which rows stay. Frames are
polars'; polars is imported when a step runs, so that `import trajstore` stays quick.
"""

from trajstore.selection.draw import (
    draw,
    quotas,
    race,
    ranked,
    seeded_keys,
    stratum_codes,
    whole_groups,
)
from trajstore.selection.gates import Fresh, InformativeGroups, Stale, Trainable, Unused, fresh
from trajstore.selection.sample import Allocation, Draw
from trajstore.selection.steps import Bounds, Limit, Step, Where, scalar_columns
from trajstore.selection.versions import (
    VERSION_OF,
    GapOf,
    fresh_tokens,
    freshness,
    mean_versions,
)

__all__ = [
    "VERSION_OF",
    "Allocation",
    "Bounds",
    "Draw",
    "Fresh",
    "GapOf",
    "InformativeGroups",
    "Limit",
    "Stale",
    "Step",
    "Trainable",
    "Unused",
    "Where",
    "draw",
    "fresh",
    "fresh_tokens",
    "freshness",
    "mean_versions",
    "quotas",
    "race",
    "ranked",
    "scalar_columns",
    "seeded_keys",
    "stratum_codes",
    "whole_groups",
]
