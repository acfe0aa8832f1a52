"""Owns objects ⇄ record batch, and the invariants of the row; knows nothing of disks or tensors' layouts."""

from trajstore.codec.check import check
from trajstore.codec.conform import conform
from trajstore.codec.decode import decode, normalize
from trajstore.codec.encode import cache_refs_left_out, encode, id_hashes, warn_cache_refs
from trajstore.codec.flat import Nulls

__all__ = [
    "Nulls",
    "cache_refs_left_out",
    "check",
    "conform",
    "decode",
    "encode",
    "id_hashes",
    "normalize",
    "warn_cache_refs",
]
