"""Give back the memory under a TLS connection's read buffer that only others have ever used.

Theory: uvloop gives each TLS connection a block of 256 KiB to read into. It takes it from where earlier handshakes had their
records, states and reads, whose pages it so keeps for its life and never looks at: half of the 48 KiB that an idle
connection took. A client's flights and requests fit the block's first page. The pages behind it are given back to the kernel
once, when TLS stands; who does read more than a page gets fresh ones.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap


def _kernels_madvise() -> ctypes._NamedFuncPointer | None:
    try:
        madvise = ctypes.PyDLL(None).madvise  # it is over in a microsecond: PyDLL keeps the lock
    except (OSError, AttributeError):
        return None
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return madvise


_madvise = _kernels_madvise()
_DONT_NEED = getattr(mmap, "MADV_DONTNEED", -1)
_WHOLE_PAGES = -mmap.PAGESIZE
_SECOND_PAGE = 2 * mmap.PAGESIZE - 1
_first_byte, _address = ctypes.c_char.from_buffer, ctypes.addressof


def give_back(transport: asyncio.BaseTransport) -> bool:
    """All whole pages of the read buffer but the first, which loses what is in them. False where there is no such buffer
    (asyncio's own TLS reads into one for all).

    To be called while nothing is being read into it, which is whenever Python runs on the loop.
    """
    reader = transport.get_extra_info("uvloop.sslproto")
    if reader is None or _madvise is None or _DONT_NEED < 0:
        return False
    buffer = reader.get_buffer(1)
    start = _address(_first_byte(buffer))
    first = (start + _SECOND_PAGE) & _WHOLE_PAGES
    size = ((start + len(buffer)) & _WHOLE_PAGES) - first
    return size > 0 and _madvise(first, size, _DONT_NEED) == 0
