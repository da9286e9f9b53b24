"""Keys on elliptic curves, in PEM, as openssl writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class KeyPair:
    private: Path
    public: Path


def write_keys(
    folder: Path, name: str = "key", *, curve: ec.EllipticCurve | None = None, password: bytes | None = None
) -> KeyPair:
    """Write a new pair; on P-256 unless said otherwise."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    locked = (
        serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    )
    pem = serialization.Encoding.PEM
    pair = KeyPair(folder / f"{name}.pem", folder / f"{name}.pub")
    pair.private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, locked))
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    pair.public.write_bytes(public)
    return pair
