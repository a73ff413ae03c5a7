"""Real certificates for tests, made by openssl."""

import subprocess
from pathlib import Path
from typing import NamedTuple

from tailrace.net.tls import TlsFiles

_NAMES = "DNS:localhost,IP:127.0.0.1,IP:::1"


class Pair(NamedTuple):
    """A certificate and its key."""

    certificate: Path
    key: Path


def _run(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


class Authority:
    """Signs certificates; ``ca`` is its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder = folder / name
        folder.mkdir()
        self.ca = folder / "ca.pem"
        (folder / "index.txt").touch()
        (folder / "serial").write_text("01\n")
        (folder / "conf").write_text(
            "[ca]\ndefault_ca=own\n[own]\ndatabase=index.txt\nserial=serial\nnew_certs_dir=.\n"
            "certificate=ca.pem\nprivate_key=ca.key\ndefault_md=sha256\npolicy=any\n"
            "unique_subject=no\ncopy_extensions=copy\n[any]\ncommonName=supplied\n"
        )
        _run(folder, "req", "-x509", *_NEW_KEY, "-nodes", "-keyout", "ca.key", "-out", "ca.pem",
             "-days", "3650", "-subj", f"/CN={name}")  # fmt: skip

    def sign(
        self, name: str, *, names: str = _NAMES, until: str = "20490101000000Z", password: str = ""
    ) -> Pair:
        """Return a certificate valid from 2020 ``until`` then."""
        lock = ("-passout", f"pass:{password}") if password else ("-nodes",)
        _run(self._folder, "req", "-new", *_NEW_KEY, *lock, "-keyout", f"{name}.key",
             "-out", f"{name}.csr", "-subj", f"/CN={name}",
             "-addext", f"subjectAltName={names}")  # fmt: skip
        _run(self._folder, "ca", "-batch", "-notext", "-config", "conf",
             "-startdate", "20200101000000Z", "-enddate", until,
             "-in", f"{name}.csr", "-out", f"{name}.pem")  # fmt: skip
        return Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def files(pair: Pair | None = None, ca: Path | None = None) -> TlsFiles:
    """Files of one side."""
    return TlsFiles(*(pair or (None, None)), ca)
