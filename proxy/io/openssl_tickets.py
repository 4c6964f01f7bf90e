"""Hand ticket keys to the OpenSSL that this interpreter's `ssl` module uses. Nobody else touches its internals.

Theory: OpenSSL seals session tickets under a key of its own making, different in each process and never rotated. It
asks a callback instead, if it was given one (SSL_CTX_set_tlsext_ticket_key_evp_cb, OpenSSL 3). Python has no name for
that, so ctypes finds it: a symbol looked up through the handle of `_ssl` itself is found in exactly the libssl that
`_ssl` was linked to, even if a wheel has brought another one into the process.

      ClientHello with a ticket -> OpenSSL -> _on_ticket(name) -> AES and HMAC keys set on OpenSSL's own contexts
      full handshake, or renewal -> OpenSSL -> _on_ticket(seal) -> the same with the current key

The SSL_CTX pointer stands behind the object's head in `PySSLContext`. That layout is not promised: it is proved
before it is used, on a context made for that, and again on every context. Where the proof fails, or the interpreter
hides its OpenSSL's symbols, `reach()` says why and OpenSSL goes on with its own tickets.

Rules for editing: 1. every function has argtypes and restype: a pointer cut to an int is a crash far away; 2. no
exception leaves `_on_ticket`; 3. what OpenSSL may still call must never be freed.
"""

from __future__ import annotations

import ctypes
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from proxy.ticketkeys import NAME_BYTES, TicketKey

IV_BYTES = 16
_POINTER = ctypes.c_void_p
_OCTET_STRING, _UTF8_STRING = 5, 4  # OSSL_PARAM data types
_UNMODIFIED = ctypes.c_size_t(-1).value
# Plain addresses: ctypes would make an object of each `unsigned char *`.
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, ctypes.c_int)

# What the callback answers (SSL_CTX_set_tlsext_ticket_key_evp_cb(3)).
FAILED, UNKNOWN, OPENED, OPENED_RENEW = -1, 0, 1, 2


class Unreachable(RuntimeError):
    """This interpreter's OpenSSL cannot be given ticket keys; the message says why."""


class _Param(ctypes.Structure):
    """OSSL_PARAM(3). A null key ends the array."""

    _fields_ = [
        ("key", ctypes.c_char_p),
        ("data_type", ctypes.c_uint),
        ("data", _POINTER),
        ("data_size", ctypes.c_size_t),
        ("return_size", ctypes.c_size_t),
    ]


class LoadedKey:
    """A ticket key in memory that OpenSSL reads, with its parameters laid out once rather than per handshake."""

    __slots__ = ("_aes", "_digest", "_hmac", "_params", "aes_at", "id", "name", "params_at")

    def __init__(self, key: TicketKey) -> None:
        self.id, self.name = key.id, key.name
        self._aes = (ctypes.c_ubyte * 32).from_buffer_copy(key.aes)
        self._hmac = (ctypes.c_ubyte * 32).from_buffer_copy(key.hmac)
        self._digest = ctypes.create_string_buffer(b"SHA256")
        self._params = (_Param * 3)()
        self._params[0] = _Param(b"key", _OCTET_STRING, ctypes.addressof(self._hmac), 32, _UNMODIFIED)
        self._params[1] = _Param(b"digest", _UTF8_STRING, ctypes.addressof(self._digest), 6, _UNMODIFIED)
        self.aes_at, self.params_at = ctypes.addressof(self._aes), ctypes.addressof(self._params)

    def wipe(self) -> None:
        for secret in (self._aes, self._hmac):
            ctypes.memset(secret, 0, 32)


@dataclass(slots=True)
class TicketCounts:
    """What the callback saw since the start."""

    issued: int = 0
    opened: int = 0
    missed: int = 0  # tickets under a key that is not in the ring: each costs a full handshake
    failed: int = 0


class TicketCallback:
    """What OpenSSL calls for every ticket. `keys` is replaced whole, newest first; `on_missing` may bring more."""

    def __init__(self, openssl: OpenSsl, on_missing: Callable[[], bool]) -> None:
        self.keys: tuple[LoadedKey, ...] = ()
        self.counts = TicketCounts()
        self._openssl = openssl
        self._on_missing = on_missing
        try:
            self.pointer = _CALLBACK(self._on_ticket)
        except (MemoryError, OSError) as exc:
            # libffi before 3.4 writes code into memory, which a sandbox (systemd's MemoryDenyWriteExecute) may deny.
            raise Unreachable(f"no callback can be made here: {exc or 'memory for code is denied'}") from exc
        # An SSL_CTX keeps the bare pointer and may outlive its Python object inside a connection.
        _NEVER_FREED.append(self.pointer)

    def _on_ticket(self, connection: int, name: int, iv: int, cipher: int, mac: int, seal: int) -> int:
        try:
            return self._seal(name, iv, cipher, mac) if seal else self._open(connection, name, iv, cipher, mac)
        except BaseException:  # noqa: BLE001 - ctypes would print it and answer 0, which TLS 1.3 cannot seal with
            self.counts.failed += 1
            return FAILED if seal else UNKNOWN

    def _seal(self, name: int, iv: int, cipher: int, mac: int) -> int:
        if not self.keys:
            return FAILED
        key = self.keys[0]
        ctypes.memmove(name, key.name, NAME_BYTES)
        if not self._openssl.seal_with(key, iv, cipher, mac):
            return FAILED
        self.counts.issued += 1
        return OPENED

    def _open(self, connection: int, name: int, iv: int, cipher: int, mac: int) -> int:
        wanted = ctypes.string_at(name, NAME_BYTES)
        at = self._find(wanted)
        if at < 0 and self._on_missing():
            at = self._find(wanted)
        if at < 0:
            self.counts.missed += 1
            return UNKNOWN
        if not self._openssl.open_with(self.keys[at], iv, cipher, mac):
            return UNKNOWN
        self.counts.opened += 1
        # A client of TLS 1.3 shows a ticket once (RFC 8446 C.4), so it needs another one even under the same key: without
        # it every second connection of a browser would be a full handshake. OpenSSL's own tickets are renewed so, too.
        return OPENED if at == 0 and not self._openssl.is_tls_1_3(connection) else OPENED_RENEW

    def _find(self, name: bytes) -> int:
        for at, key in enumerate(self.keys):
            if key.name == name:
                return at
        return -1


_NEVER_FREED: list[object] = []


class OpenSsl:
    """The functions of libssl and libcrypto that tickets need. Made once, by `reach()`."""

    def __init__(self) -> None:
        library = _library()
        address, integer = _POINTER, ctypes.c_int
        self._options = _bound(library, "SSL_CTX_get_options", ctypes.c_uint64, address)
        self._set_timeout = _bound(library, "SSL_CTX_set_timeout", ctypes.c_long, address, ctypes.c_long)
        self._set_callback = _bound(library, "SSL_CTX_set_tlsext_ticket_key_evp_cb", integer, address, _CALLBACK)
        self._seal_init = _bound(library, "EVP_EncryptInit_ex", integer, address, address, address, address, address)
        self._open_init = _bound(library, "EVP_DecryptInit_ex", integer, address, address, address, address, address)
        self._set_params = _bound(library, "EVP_MAC_CTX_set_params", integer, address, address)
        self._random = _bound(library, "RAND_bytes", integer, address, integer)
        self._version_of = _bound(library, "SSL_version", integer, address)
        self._set_suites = _bound(library, "SSL_CTX_set_ciphersuites", integer, address, ctypes.c_char_p)
        version = _bound(library, "OpenSSL_version_num", ctypes.c_ulong)
        self._aes_256_cbc = _bound(library, "EVP_aes_256_cbc", address)()
        if version() != ssl.OPENSSL_VERSION_NUMBER:
            raise Unreachable(f"found OpenSSL {version():#x}, but ssl runs {ssl.OPENSSL_VERSION_NUMBER:#x}")
        self._prove_layout()

    def install(self, context: ssl.SSLContext, callback: TicketCallback, lifetime_s: float) -> None:
        """From now on this context's tickets are sealed and opened by `callback`, and live `lifetime_s`."""
        pointer = self._pointer(context)
        if self._set_callback(pointer, callback.pointer) != 1:
            raise Unreachable("SSL_CTX_set_tlsext_ticket_key_evp_cb refused the callback")
        self._set_timeout(pointer, int(lifetime_s))

    def prefer(self, context: ssl.SSLContext, suites: str) -> None:
        """Offer these suites of TLS 1.3, best first; Python has no word for them before 3.15."""
        if self._set_suites(self._pointer(context), suites.encode()) != 1:
            raise Unreachable(f"SSL_CTX_set_ciphersuites refused {suites}")

    def is_tls_1_3(self, connection: int) -> bool:
        """Of an SSL pointer, as the callback gets it."""
        return self._version_of(connection) >= ssl.TLSVersion.TLSv1_3

    def set_lifetime(self, context: ssl.SSLContext, lifetime_s: float) -> None:
        """For tickets issued from now on."""
        self._set_timeout(self._pointer(context), int(lifetime_s))

    def seal_with(self, key: LoadedKey, iv: int, cipher: int, mac: int) -> bool:
        """Set the key and a fresh IV, written to `iv`, on the cipher and MAC contexts that OpenSSL passed in."""
        if self._random(iv, IV_BYTES) != 1 or self._set_params(mac, key.params_at) != 1:
            return False
        return self._seal_init(cipher, self._aes_256_cbc, None, key.aes_at, iv) == 1

    def open_with(self, key: LoadedKey, iv: int, cipher: int, mac: int) -> bool:
        """The same, with the IV that a ticket brought."""
        if self._set_params(mac, key.params_at) != 1:
            return False
        return self._open_init(cipher, self._aes_256_cbc, None, key.aes_at, iv) == 1

    def _pointer(self, context: ssl.SSLContext) -> int:
        pointer = _behind_head(context)
        if pointer is None or self._options(pointer) != int(context.options) & (2**64 - 1):
            raise Unreachable("an SSLContext of this interpreter is laid out otherwise")
        return pointer

    def _prove_layout(self) -> None:
        """The pointer leads into writable memory, and what Python sets is what OpenSSL says through it, twice."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pointer = _behind_head(context)
        # Reading through a wrong pointer is a crash, not an exception: so look at the map of memory first.
        if pointer is None or pointer % ctypes.alignment(_POINTER) or not _is_writable(pointer):
            raise Unreachable("an SSLContext of this interpreter holds no pointer where one was expected")
        for _ in range(2):
            self._pointer(context)
            context.options ^= ssl.OP_NO_TICKET


@cache
def reach() -> OpenSsl:
    """The one bridge of this process. Unreachable says why there is none; asking again asks anew."""
    return OpenSsl()


def _library() -> ctypes.PyDLL:
    try:
        import _ssl
    except ImportError as exc:  # pragma: no cover - then `ssl` is missing, too
        raise Unreachable("this interpreter has no ssl module") from exc
    try:
        # PyDLL keeps the interpreter's lock: what is called here takes less time than letting go of it.
        return ctypes.PyDLL(getattr(_ssl, "__file__", None))
    except OSError as exc:
        raise Unreachable(f"the ssl module cannot be opened as a library: {exc}") from exc


def _bound(library: ctypes.PyDLL, name: str, result: object, *arguments: object) -> Callable[..., int]:
    try:
        function = library[name]
    except AttributeError as exc:
        raise Unreachable(f"{ssl.OPENSSL_VERSION} of this interpreter does not show {name}") from exc
    function.restype = result  # type: ignore[assignment]
    function.argtypes = arguments  # type: ignore[assignment]
    return function


def _behind_head(context: ssl.SSLContext) -> int | None:
    return ctypes.c_void_p.from_address(id(context) + object.__basicsize__).value


def _is_writable(address: int) -> bool:
    """False, too, where the system has no map of memory to look at."""
    try:
        spans = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    for line in spans:
        span, mode = line.split(maxsplit=2)[:2]
        first, last = (int(edge, 16) for edge in span.split("-"))
        if first <= address < last:
            return mode.startswith("rw")
    return False
