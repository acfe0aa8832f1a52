"""Owns the build of the optional C kernel, a hook of the wheel's build; imports nothing of the package.

`python trajstore/layouts/build_kernel.py` builds it beside the sources, as `pip install -e .` does.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def named_after(source: Path) -> str:
    """Name of the library of a source, so that kernels.py never calls that of another one."""
    return f"_kernel-{hashlib.blake2b(source.read_bytes(), digest_size=4).hexdigest()}.so"


SOURCE = Path(__file__).with_name("_kernel.c")
LIBRARY = SOURCE.with_name(named_after(SOURCE))


def compile_kernel(source: Path, library: Path) -> str | None:
    """Builds the library with $CC (default: cc); None when it is there, else why it is not.

    Libraries that were there before, of whatever source, do not outlive a build, a failed one neither.
    """
    for old in library.parent.glob("_kernel*.so"):
        old.unlink(missing_ok=True)
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".kernel-") as folder:
        made = Path(folder) / library.name
        flags = ["-O3", "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(made), str(source)]
        try:
            done = subprocess.run([*compiler, *flags], capture_output=True, text=True, check=False)
        except OSError as error:
            return str(error)
        if done.returncode or not made.exists():
            return f"{shlex.join(compiler)} exited with {done.returncode}: {done.stderr.strip()}"
        made.replace(library)
    return None


class KernelHook(BuildHookInterface[Any]):
    """Puts the library into the wheel, whose tag then names the platform; without a compiler, neither."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        why = compile_kernel(SOURCE, LIBRARY)
        if why is not None:
            self.app.display_warning(f"no C kernel, the numpy path will be used: {why}")
            return
        build_data["artifacts"].append(f"trajstore/layouts/{LIBRARY.name}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    sys.exit(compile_kernel(SOURCE, LIBRARY))
