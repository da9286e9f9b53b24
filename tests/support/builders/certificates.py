"""A certificate authority of a test's own, with a certificate for the loopback and one for a client, as PEM
files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files. ca signed all of them; stranger is signed by another."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path
    stranger_cert: Path
    stranger_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Write the files into ``folder``."""
    authority, other = trustme.CA(), trustme.CA()
    ca = folder / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))

    def issue(name: str, issued: trustme.LeafCert) -> tuple[Path, Path]:
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        for index, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(str(cert), append=index > 0)
        issued.private_key_pem.write_to_path(str(key))
        return cert, key

    server = issue("server", authority.issue_cert("127.0.0.1", "localhost"))
    client = issue("client", authority.issue_cert("client.example"))
    stranger = issue("stranger", other.issue_cert("client.example"))
    return Certificates(ca, *server, *client, *stranger)
