"""Owns the script that draws a page's plots, kept in the user's cache folder once made; knows no plot.

vl-convert takes seconds of CPU to put Vega, Vega-Lite and Vega-Embed into one script, and gives the same text
for the same versions, which are in the file's name.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import altair as alt
import vl_convert

from trajstore.store.cache import default_folder


def library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, of the versions that altair speaks.

    A cache folder that cannot be written costs the time again, and nothing else.
    """
    version = "_".join(alt.SCHEMA_VERSION.split(".")[:2])
    made_by = importlib.metadata.version("vl-convert-python")
    kept = default_folder() / "report" / f"vega-lite-{version}-by-vl-convert-{made_by}.js"
    with suppress(OSError):
        return kept.read_text(encoding="utf-8")
    # The stub has no default for the snippet, the function has.
    bundle = vl_convert.javascript_bundle(vl_version=version)  # type: ignore[call-arg]
    script = bundle.replace("</script", "<\\/script")
    with suppress(OSError):
        _keep(kept, script)
    return script


def _keep(path: Path, text: str) -> None:
    """Writes a file that others see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, aside = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as sink:
            sink.write(text)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink()
        raise
