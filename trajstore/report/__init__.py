"""Owns the report: a store's facts, and the one page that shows them; needs the extra `report` for its plots."""

from trajstore.report.facts import Facts, gather
from trajstore.report.html import page

__all__ = ["Facts", "gather", "page"]
