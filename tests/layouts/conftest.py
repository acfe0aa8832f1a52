"""Every test of this folder runs twice: with the numpy reference, and with the C kernel."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from trajstore.layouts import kernel, kernels
from trajstore.layouts.build_kernel import LIBRARY, SOURCE, compile_kernel


@pytest.fixture(scope="session")
def built() -> str | None:
    """Builds the C kernel from the source as it is now; why it could not, when there is no compiler."""
    if shutil.which("cc") is None:
        return "no C compiler on this machine"
    if not LIBRARY.exists():  # its name is that of its source
        why = compile_kernel(SOURCE, LIBRARY)
        assert why is None, why
    kernels._library.cache_clear()
    return None


@pytest.fixture(scope="module", params=["numpy", "c"], autouse=True)
def form(request: pytest.FixtureRequest, built: str | None) -> Iterator[Any]:
    if request.param == "c" and built is not None:
        pytest.skip(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAJSTORE_KERNEL", request.param)
        assert kernel() == request.param
        yield request.param
