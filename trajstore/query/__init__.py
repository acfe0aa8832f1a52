"""Owns asking: gates, samplers and SQL over a store or a scan; knows no tensors."""

from trajstore.query.sampling import stratified_sample
from trajstore.query.sql import Connection, connect
from trajstore.selection import Fresh, fresh

__all__ = ["Connection", "Fresh", "connect", "fresh", "stratified_sample"]
