"""Blocks as large as a TLS read come from the heap, not from the kernel."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

STORY = """
import ctypes, json
from headrace.allocator import keep_blocks

FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
MallInfo = type("MallInfo", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in FIELDS]})
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallInfo


def from_kernel():
    before = mallinfo().hblks
    block = bytes(256 * 1024 + 33)
    return mallinfo().hblks - before


print(json.dumps([from_kernel(), keep_blocks(), from_kernel()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_block_of_a_tls_read_is_taken_from_the_heap() -> None:
    told = subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == [1, True, 0]
