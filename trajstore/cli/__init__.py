"""Owns the shell: the library's verbs under the same names, and what they print; computes nothing."""

from trajstore.cli.app import main

__all__ = ["main"]
