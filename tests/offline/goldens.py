"""The outputs of trlX itself, recorded at the commit that MANIFEST.json names."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "ilql"


@cache
def golden(name: str) -> Any:
    """A recorded file; NaN and infinities are strings in it."""
    return _floats(json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes())))


def _floats(value: Any) -> Any:
    match value:
        case dict():
            return {key: _floats(item) for key, item in value.items()}
        case list():
            return [_floats(item) for item in value]
        case "nan" | "inf" | "-inf":
            return float(value)
        case _:
            return value
