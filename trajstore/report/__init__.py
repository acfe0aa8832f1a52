"""Owns the report: a store's facts, and the one page that shows them; its plots need the extra `report`."""

from trajstore.report.facts import Facts, gather
from trajstore.report.html import page

__all__ = ["Facts", "gather", "page"]
