"""TLS: contexts made from files that may change, and listeners that use them.

Listeners accept connections themselves, so that handshakes in progress are bounded, and each uses
the certificate that is valid when it begins.
"""

import asyncio
import datetime
import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from tailrace.errors import TailraceError

#: Handshakes of a listener at once; further connections are closed.
MAX_HANDSHAKES = 1024
#: Time for the peer to confirm the end of a connection, s.
SHUTDOWN_S = 2.0
#: Connections accepted in one turn of the event loop.
_ACCEPTED_AT_ONCE = 64
#: Pause after connections could not be accepted, s.
_AGAIN_S = 0.1
#: How long before its end a certificate is warned of, and how often, s.
WARN_BEFORE_S, _WARN_EVERY_S = 7 * 86_400.0, 86_400.0
_CERTIFICATE, _KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"

_log = logging.getLogger("tailrace.net")


class TlsFiles(NamedTuple):
    """PEM files of one side of TLS connections."""

    certificate: Path | None = None
    """Own certificate, then those that signed it."""
    key: Path | None = None
    """Key of the certificate; None: it stands in the same file."""
    ca: Path | None = None
    """Authorities that the other side's certificate must be signed by."""

    def shown(self) -> str:
        """Return the names of the files."""
        return ", ".join(str(path) for path in self if path is not None)

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return what changes when a file does, also by a swapped symbolic link."""
        return tuple(_stamp(path) for path in self)


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class TlsContext:
    """A context made from files, and made anew when they change."""

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles], ssl.SSLContext]) -> None:
        """``make``: :func:`server_context` or :func:`client_context`; raises a sentence."""
        self.files = files
        self._make = make
        self._stamp = files.stamp()
        self.context = make(files)

    def refresh(self) -> bool:
        """Read the files again if one has changed; return whether it was so.

        Raise if they cannot be used: the former context stays, until they change once more.
        Connections that are open keep what they have agreed on.
        """
        stamp = self.files.stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.context = self._make(self.files)
        return True


class TlsContexts:
    """The contexts of a process, each made once for all connections that use the same files."""

    def __init__(self) -> None:
        # Those that nobody uses any more are forgotten.
        self._servers: WeakValueDictionary[tuple[object, ...], TlsContext] = WeakValueDictionary()
        self._clients: WeakValueDictionary[TlsFiles, TlsContext] = WeakValueDictionary()
        self._warned_at: dict[Path, float] = {}

    def server(self, files: TlsFiles, protocols: Sequence[str]) -> TlsContext:
        """Return the context of a listener."""
        key = files, tuple(protocols)
        found = self._servers.get(key)
        if found is None:
            made = TlsContext(files, lambda files: server_context(files, protocols))
            found = self._servers[key] = made
        return found

    def client(self, files: TlsFiles) -> TlsContext:
        """Return the context for connections to servers."""
        found = self._clients.get(files)
        if found is None:
            found = self._clients[files] = TlsContext(files, client_context)
        return found

    def refresh(self) -> None:
        """Read files that have changed again, and warn of certificates that expire; never raise."""
        for used in (*self._servers.values(), *self._clients.values()):
            try:
                if used.refresh():
                    _log.info("certificates were read again", extra={"files": used.files.shown()})
            except TailraceError as error:
                _log.error("the former certificates stay in use", extra={"why": str(error)})
            if used.files.certificate is not None:
                self._warn(used.files.certificate)

    def _warn(self, path: Path) -> None:
        """Warn once a day of a certificate that has expired or soon will."""
        now = time.time()
        if now - self._warned_at.get(path, 0.0) < _WARN_EVERY_S:
            return
        self._warned_at[path] = now
        end = expires_at(path)
        if end is not None and end.timestamp() - now < WARN_BEFORE_S:
            past = end.timestamp() <= now
            _log.warning(
                "a certificate %s", "has expired" if past else "expires soon",
                extra={"file": str(path), "at": end.isoformat()},
            )  # fmt: skip


def server_context(files: TlsFiles, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return the context of a listener; ``protocols``: for ALPN. With ``ca``, clients need one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_own(context, files)
    if files.ca is not None:
        _load_ca(context, files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def client_context(files: TlsFiles = TlsFiles()) -> ssl.SSLContext:  # noqa: B008
    """Return the context for connections to a server; without ``ca``, the system's are trusted."""
    if files.ca is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_ca(context, files.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.certificate is not None:
        _load_own(context, files)
    return context


def pinned_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context for connections to a listener of this machine whose certificate is known.

    ``ca``: that certificate. The address is not checked, so nothing else is accepted, except
    certificates signed by one that follows it in the file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    assert files.ca is not None
    _load_ca(context, files.ca)
    if files.certificate is not None:
        _load_own(context, files)
    return context


class _EncryptedError(Exception):
    """A key needs a password."""


def _no_password() -> str:
    raise _EncryptedError


def _load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    certificate, key = files.certificate, files.key or files.certificate
    assert certificate is not None
    assert key is not None
    if _CERTIFICATE not in _read(certificate, "certificate"):
        raise TailraceError(f"there is no certificate in {certificate}; it must be PEM")
    if _KEY not in _read(key, "key"):
        raise TailraceError(f"there is no private key in {key}; it must be PEM")
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except _EncryptedError:
        raise TailraceError(
            f"the key in {key} needs a password; store it without one, readable by this user only"
        ) from None
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            why = f"the key in {key} does not belong to the certificate in {certificate}"
        else:
            why = f"cannot use certificate {certificate} with key {key}: {error.reason or error}"
        raise TailraceError(why) from None


def _load_ca(context: ssl.SSLContext, path: Path) -> None:
    if _CERTIFICATE not in _read(path, "authorities"):
        raise TailraceError(f"there is no certificate in {path}; it must be PEM")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise TailraceError(f"cannot use {path}: {error.reason or error}") from None


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TailraceError(f"cannot read the {what} {path}: {error.strerror}") from None


def explain(error: OSError) -> str:
    """Return why a connection failed; for certificates in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).lower().replace("_", " ")
        return f"TLS failed: {reason}"
    return error.strerror or str(error)


# When a certificate expires.


def expires_at(path: Path) -> datetime.datetime | None:
    """Return when the first certificate of a PEM file expires; None: it cannot be read.

    The ``ssl`` module shows the dates of authorities and of peers only.
    """
    try:
        text = path.read_text("ascii", "replace")
        begin = text.index(_CERTIFICATE.decode())
        end = "-----END CERTIFICATE-----"
        der = ssl.PEM_cert_to_DER_cert(text[begin : text.index(end, begin) + len(end)])
        body = _inside(_inside(der, 0), 0)
        at = 0
        if body[0] == 0xA0:  # the version, which may be absent
            at = _next(body, at)
        for _ in range(3):  # serial number, algorithm, issuer
            at = _next(body, at)
        validity = _inside(body, at)
        second = _next(validity, 0)
        value = _inside(validity, second).decode("ascii")
        # Two digits of the year up to 2049 (RFC 5280 4.1.2.5).
        if validity[second] == 0x17:
            value = ("20" if int(value[:2]) < 50 else "19") + value
        moment = datetime.datetime.strptime(value, "%Y%m%d%H%M%SZ")
    except (OSError, ValueError, IndexError):
        return None
    return moment.replace(tzinfo=datetime.UTC)


def _bounds(der: bytes, at: int) -> tuple[int, int]:
    """Return where the content of an ASN.1 value begins and ends."""
    size = der[at + 1]
    start = at + 2
    if size & 0x80:
        count = size & 0x7F
        size = int.from_bytes(der[start : start + count], "big")
        start += count
    if start + size > len(der):
        raise ValueError("cut off")
    return start, start + size


def _inside(der: bytes, at: int) -> bytes:
    start, end = _bounds(der, at)
    return der[start:end]


def _next(der: bytes, at: int) -> int:
    return _bounds(der, at)[1]


# Listeners.


class TlsListener:
    """Accepts connections on a socket that listens; their handshakes are bounded."""

    def __init__(
        self,
        sock: socket.socket,
        tls: TlsContext,
        make: Callable[[], asyncio.Protocol],
        handshake_s: float,
    ) -> None:
        """``make``: the protocol of a connection, called once its handshake is over."""
        self._sock = sock
        self._tls = tls
        self._make = make
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self.handshakes: set[asyncio.Task[None]] = set()
        """Handshakes in progress."""
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # No file is left: wait until some are free.
                _log.warning("cannot accept connections", extra={"why": error.strerror})
                self._loop.remove_reader(self._sock)
                self._loop.call_later(_AGAIN_S, self._resume)
                return
            if len(self.handshakes) >= MAX_HANDSHAKES:
                connection.close()
                continue
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._shake(connection))
            self.handshakes.add(task)
            task.add_done_callback(self.handshakes.discard)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._tls.context,
                ssl_handshake_timeout=self._handshake_s, ssl_shutdown_timeout=SHUTDOWN_S,
            )  # fmt: skip
        except OSError as error:
            _log.debug("a handshake has failed: %s", error)
            connection.close()

    def close(self) -> None:
        """Accept no more connections."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def abort(self) -> None:
        """End handshakes in progress."""
        for task in tuple(self.handshakes):
            task.cancel()
