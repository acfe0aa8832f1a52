"""Owns the shell: the verbs of the library under the same names, and what they print; computes nothing itself."""

from trajstore.cli.app import main

__all__ = ["main"]
