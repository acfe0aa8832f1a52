"""Owns the demo: an asynchronous RL run in small, on the spot; knows only what users of the library know."""

from trajstore.demo.run import run_demo

__all__ = ["run_demo"]
