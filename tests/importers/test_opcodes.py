"""Owns the tests of what a pickle claims: a small file cannot make the decoder take much memory."""

import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.importers.opcodes import check_claims

CLAIMS = {
    "the memo entry 20,000,000": b"\x80\x02Nr" + struct.pack("<I", 20_000_000) + b".",
    "the memo entry 4,294,967,295": b"\x80\x02]" + b"K\x01a" * 99 + b"r\xff\xff\xff\xff.",
    "the memo entry 20,000,001": b"Np20000001\n.",
    "the memo entry -1": b"Np-1\n.",
    "a frame of 1,099,511,627,776": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "a value of 134,217,728": b"\x80\x05\x96" + struct.pack("<Q", 1 << 27) + b"x.",  # a bytearray
    "a value of 134,217,729": b"\x80\x04\x8e" + struct.pack("<Q", (1 << 27) + 1) + b"x.",  # bytes
    "a value of 134,217,730": b"\x80\x04\x8d" + struct.pack("<Q", (1 << 27) + 2) + b"x.",  # text
    "a value of 134,217,731": b"\x80\x02X" + struct.pack("<I", (1 << 27) + 3) + b"x.",
    "a value of -1": b"\x80\x02\x8b\xff\xff\xff\xff.",  # a long integer
}

LOAD = """
import re, resource, sys
from pathlib import Path
from trajstore.errors import ImportFormatError
from trajstore.importers.pickles import load_pickle

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
before = peak()
try:
    load_pickle(Path("evil.pkl"), Path(sys.argv[1]).read_bytes())
except ImportFormatError as error:
    print(peak() - before, error.message)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of its memory")
@pytest.mark.parametrize("claim", ["the memo entry 20,000,000", "the memo entry 20,000,001"])
def test_a_small_pickle_takes_little_memory(tmp_path: Path, claim: str) -> None:
    (tmp_path / "evil.pkl").write_bytes(CLAIMS[claim])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "evil.pkl")], capture_output=True, text=True
    )
    assert f"evil.pkl: refused: it claims {claim} where less than" in done.stdout, done.stderr
    assert int(done.stdout.split()[0]) < 64 << 10, "KiB; Python's own decoder takes 300 MiB"


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_a_pickle_cannot_hold_is_refused(claim: str) -> None:
    for data in (CLAIMS[claim], memoryview(CLAIMS[claim])):
        with pytest.raises(pickle.UnpicklingError, match=f"it claims {claim} where less than"):
            check_claims(data)


@pytest.mark.parametrize(
    "data", [b"", b"N", b"\x80\x02K", b"\xff.", b"cos\nsystem", b"X\x01", b"Np1", b"G1."]
)
def test_a_pickle_that_breaks_off_is_told(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="it ends "):
        check_claims(data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**2100), 2**2100)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.binary(max_size=8).map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.tuples(inner, inner)
        | st.frozensets(st.integers())
    ),
    max_leaves=40,
)


@settings(max_examples=60)
@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_an_honest_pickle_passes_and_a_cut_one_does_not(value: Any, protocol: int) -> None:
    data = pickle.dumps([value, value, complex(1, 2)], protocol)
    check_claims(data + b"\xff")  # nothing behind the end is looked at
    with pytest.raises(pickle.UnpicklingError):
        check_claims(data[:-1])


def test_many_memo_entries_pass() -> None:
    data = pickle.dumps([[i] for i in range(1000)], 2)
    assert b"r" + struct.pack("<I", 300) in data
    check_claims(data)
