"""A signature covers every file of a model's folder, and model-signing's own command agrees with it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.artifact.signature import MAX_SIGNATURE_BYTES, check_signature, sign
from llorch_serve.artifact.signed_files import SIGNATURE_NAME
from llorch_serve.errors import ArtifactError, UsageError
from support.builders.signing_keys import KeyPair, write_keys
from support.builders.tiny_artifact import write_tiny_artifact


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_artifact(tmp_path / "artifact")


@pytest.fixture
def keys(tmp_path: Path) -> KeyPair:
    return write_keys(tmp_path)


@pytest.fixture
def signed(folder: Path, keys: KeyPair) -> Path:
    sign(folder, keys.private)
    return folder


def refusal(folder: Path, keys: KeyPair, kind: type[Exception] = ArtifactError) -> str:
    with pytest.raises(kind) as caught:
        check_signature(folder, keys.public)
    return str(caught.value)


def model_signing(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the package's own command, which knows nothing of llorch."""
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_what_is_signed_is_accepted(folder: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    keys = write_keys(tmp_path, curve=curve)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sign(folder, keys.private) == folder / SIGNATURE_NAME
    check_signature(folder, keys.public).check_unchanged()
    sign(folder, keys.private)  # again, over the old signature
    check_signature(folder, keys.public)
    assert {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != SIGNATURE_NAME
    } == before
    load_artifact(folder, verify_hashes=True)


def test_the_package_accepts_our_signature_and_we_its(signed: Path, keys: KeyPair) -> None:
    (signed / "README.md").write_text("a card that the hub has")
    flags = ("--signature", signed / SIGNATURE_NAME, "--public_key", keys.public)
    assert model_signing("verify", "key", signed, *flags).returncode == 0
    (signed / "README.md").unlink()
    (signed / SIGNATURE_NAME).unlink()
    flags = ("--signature", signed / SIGNATURE_NAME, "--private_key", keys.private)
    assert model_signing("sign", "key", signed, *flags).returncode == 0
    check_signature(signed, keys.public)


def change(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"NOT a graph")


def change_manifest(folder: Path) -> None:
    (folder / "llorch.json").write_bytes((folder / "llorch.json").read_bytes() + b"\n")


def add(folder: Path) -> None:
    (folder / "more.bin").write_bytes(b"")


def add_deep(folder: Path) -> None:
    (folder / "a" / ".git").mkdir(parents=True)
    (folder / "a" / ".git" / "more.bin").write_bytes(b"")


def remove(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (change, "model.onnx"),
        (change_manifest, "llorch.json"),
        (add, "more.bin"),
        (add_deep, "more.bin"),
        (remove, "chat_template"),
    ],
)
def test_a_file_that_is_not_as_signed_is_named(
    signed: Path, keys: KeyPair, edit: Callable[[Path], None], name: str
) -> None:
    edit(signed)
    assert name in refusal(signed, keys)
    (signed / "llorch.json").unlink(missing_ok=True)  # then it is no artifact, and still not what was signed
    assert "get it again" in refusal(signed, keys)


def test_the_hubs_card_and_gits_files_may_come_later(signed: Path, keys: KeyPair) -> None:
    (signed / "README.md").write_text("card")
    (signed / ".gitattributes").write_text("*.data filter=lfs")
    (signed / ".git").mkdir()
    (signed / ".git" / "HEAD").write_text("ref")
    check_signature(signed, keys.public)


def test_no_signature_is_refused_with_the_command_that_signs(folder: Path, keys: KeyPair) -> None:
    assert "llorch sign" in refusal(folder, keys)


def test_another_key_is_refused(signed: Path, tmp_path: Path) -> None:
    assert "name the key that signed it" in refusal(signed, write_keys(tmp_path, "other"))


def test_a_signature_that_names_the_key_without_having_it_is_refused(
    signed: Path, keys: KeyPair, tmp_path: Path
) -> None:
    real = json.loads((signed / SIGNATURE_NAME).read_bytes())
    change(signed)
    other = write_keys(tmp_path, "other")
    flags = ("--signature", signed / SIGNATURE_NAME, "--private_key", other.private)
    assert model_signing("sign", "key", signed, *flags).returncode == 0
    forged = json.loads((signed / SIGNATURE_NAME).read_bytes())
    forged["verificationMaterial"] = real["verificationMaterial"]
    (signed / SIGNATURE_NAME).write_text(json.dumps(forged))
    assert "was not made by the key" in refusal(signed, keys)


def bundle(folder: Path, edit: Callable[[dict[str, object]], object]) -> bytes:
    document = json.loads((folder / SIGNATURE_NAME).read_bytes())
    edit(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "made",
    [
        lambda _: b"",
        lambda _: b"[" * 100_000,
        lambda _: b"\xff\xfe",
        lambda _: b"x" * (MAX_SIGNATURE_BYTES + 1),
        lambda folder: bundle(folder, lambda d: d.update(dsseEnvelope={})),
        lambda folder: bundle(folder, lambda d: d["dsseEnvelope"].update(signatures=[])),
        lambda folder: bundle(folder, lambda d: d["dsseEnvelope"]["signatures"][0].update(sig="AAAA")),
        lambda folder: bundle(folder, lambda d: d["dsseEnvelope"].update(payload="e30=")),
        lambda folder: bundle(folder, lambda d: d["verificationMaterial"]["publicKey"].pop("hint")),
        lambda folder: bundle(folder, lambda d: d["verificationMaterial"]["publicKey"].update(hint="")),
        lambda folder: bundle(folder, lambda d: d["verificationMaterial"].update(publicKey=None)),
        lambda folder: bundle(folder, lambda d: d.update(mediaType="text/plain")),
        lambda folder: bundle(folder, lambda d: d["dsseEnvelope"].update(payloadType="text/plain")),
    ],
)
def test_what_is_no_signature_is_refused_in_a_line(
    signed: Path, keys: KeyPair, made: Callable[[Path], bytes]
) -> None:
    (signed / SIGNATURE_NAME).write_bytes(made(signed))
    assert SIGNATURE_NAME in refusal(signed, keys) or "is not what the key" in refusal(signed, keys)


def test_a_payload_that_was_altered_is_refused(signed: Path, keys: KeyPair) -> None:
    change(signed)
    document = json.loads((signed / SIGNATURE_NAME).read_bytes())
    payload = base64.b64decode(document["dsseEnvelope"]["payload"])
    document["dsseEnvelope"]["payload"] = base64.b64encode(payload + b" ").decode()
    (signed / SIGNATURE_NAME).write_text(json.dumps(document))
    assert "altered" in refusal(signed, keys)


def test_a_signer_who_leaves_out_a_file_of_the_model_is_refused(folder: Path, keys: KeyPair) -> None:
    flags = ("--private_key", keys.private, "--ignore-paths", folder / "model.onnx")
    made = model_signing("sign", "key", folder, "--signature", folder / SIGNATURE_NAME, *flags)
    assert made.returncode == 0, made.stderr
    assert "has model.onnx, which its signature does not cover" in refusal(folder, keys)


def test_links_are_followed_where_they_may_lead(folder: Path, keys: KeyPair, tmp_path: Path) -> None:
    sign(folder, keys.private)
    volume = tmp_path / "volume"
    volume.mkdir()
    folder.rename(volume / "..2026")
    (volume / "..data").symlink_to("..2026")
    for path in list((volume / "..2026").iterdir()):
        (volume / path.name).symlink_to(f"..data/{path.name}")
    check_signature(volume, keys.public)
    (volume / "more.bin").symlink_to("..data/model.onnx")
    assert "more.bin" in refusal(volume, keys)


def test_links_and_pipes_that_no_signature_covers_are_refused(signed: Path, keys: KeyPair) -> None:
    outside = signed.parent / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"x")
    (signed / "more").symlink_to(outside)
    assert "link to a folder" in refusal(signed, keys)
    (signed / "more").unlink()
    (signed / "more").symlink_to(outside / "file")
    assert "leads out of its folder" in refusal(signed, keys)
    (signed / "more").unlink()
    os.mkfifo(signed / "more")
    assert "no regular file" in refusal(signed, keys)


def test_a_file_that_is_replaced_after_the_check_is_seen(signed: Path, keys: KeyPair) -> None:
    checked = check_signature(signed, keys.public)
    graph = signed / "model.onnx"
    status = graph.stat()
    graph.write_bytes(b"NOT a graph")
    os.utime(graph, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ArtifactError, match="changed between"):
        checked.check_unchanged()


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_a_key_that_is_none_is_refused(signed: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    assert "expected a public key" in refusal(signed, KeyPair(path, path), UsageError)
    with pytest.raises(UsageError, match="expected a private key"):
        sign(signed, path)
    path.unlink()
    assert "cannot be read" in refusal(signed, KeyPair(path, path), UsageError)


def test_a_key_of_another_kind_is_refused(folder: Path, tmp_path: Path, keys: KeyPair) -> None:
    curve = write_keys(tmp_path, "k1", curve=ec.SECP256K1())
    with pytest.raises(UsageError, match="P-256"):
        sign(folder, curve.private)
    with pytest.raises(UsageError, match="expected a private key"):
        sign(folder, keys.public)
    assert "expected a public key" in refusal(folder, KeyPair(keys.private, keys.private), UsageError)


def test_an_encrypted_key_needs_its_password(folder: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, password=b"secret")
    for password in (None, "wrong"):
        with pytest.raises(UsageError, match="--private-key"):
            sign(folder, keys.private, password)
    assert not (folder / SIGNATURE_NAME).exists()
    sign(folder, keys.private, "secret")
    check_signature(folder, keys.public)


def test_a_folder_of_another_tool_is_checked_too(tmp_path: Path, keys: KeyPair) -> None:
    folder = tmp_path / "other"
    (folder / "deep").mkdir(parents=True)
    (folder / "genai_config.json").write_bytes(b"{}")
    (folder / "deep" / "model.onnx").write_bytes(b"graph")
    flags = ("--signature", folder / SIGNATURE_NAME, "--private_key", keys.private)
    assert model_signing("sign", "key", folder, *flags).returncode == 0
    check_signature(folder, keys.public)
    (folder / "deep" / "model.onnx").write_bytes(b"GRAPH")
    assert "deep/model.onnx" in refusal(folder, keys)


def test_a_file_of_absurd_size_is_not_read(signed: Path, keys: KeyPair) -> None:
    with (signed / "model.onnx").open("r+b") as file:
        file.truncate(2**32)
    assert "where the manifest says" in refusal(signed, keys)
    (signed / "model.onnx").unlink()
    with (signed / "more").open("wb") as file:
        file.truncate(2**32)
    assert "more, which its signature does not cover" in refusal(signed, keys)


def test_a_damaged_artifact_is_not_signed(folder: Path, keys: KeyPair) -> None:
    change(folder)
    with pytest.raises(ArtifactError, match="where the manifest says"):
        sign(folder, keys.private)
    assert not (folder / SIGNATURE_NAME).exists()
