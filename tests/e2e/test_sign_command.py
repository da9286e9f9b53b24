"""``llorch sign``, and commands that refuse what is not signed before they load any of it."""

from __future__ import annotations

import shutil
import sys

import pytest

from llorch_serve.artifact import signature
from support.builders.signing_keys import write_keys
from support.harness.processes import llorch_here

PROMPT = ("--prompt", "Water boils at", "--max-tokens", "2")


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path)


@pytest.fixture
def signed(tiny, tmp_path, keys):
    folder = tmp_path / "signed"
    shutil.copytree(tiny, folder)
    outcome = llorch_here("sign", folder, "--private-key", keys.private)
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    assert outcome.stdout == f"{folder}/model.sig covers every file of {folder}\n"
    return folder


def test_a_signed_artifact_answers(signed, keys):
    flags = ("--verify-signature", keys.public)
    assert llorch_here("generate", signed, *PROMPT, *flags).code == 0
    score = ("score", signed, "--context", "Water", "--continuation", " boils")
    assert llorch_here(*score, *flags).code == 0
    assert llorch_here("serve", signed, "--preload-only", *flags).code == 0


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_changed_one_is_refused_in_a_line(signed, keys, command):
    data = bytearray((signed / "model.onnx.data").read_bytes())
    data[-1] ^= 1
    (signed / "model.onnx.data").write_bytes(data)
    flags = PROMPT if command == "generate" else ("--preload-only",)
    outcome = llorch_here(command, signed, *flags, "--verify-signature", keys.public)
    assert (outcome.code, outcome.stdout, outcome.stderr.count("\n")) == (3, "", 1), outcome
    assert "model.onnx.data" in outcome.stderr
    assert llorch_here(command, signed, *flags).code == 0


def test_one_without_a_signature_is_refused(tiny, keys):
    outcome = llorch_here("generate", tiny, *PROMPT, "--verify-signature", keys.public)
    assert (outcome.code, outcome.stdout) == (3, "")
    assert "is not signed" in outcome.stderr


def test_the_environment_asks_a_worker(tiny, keys):
    outcome = llorch_here("serve", tiny, "--preload-only", LLORCH_VERIFY_SIGNATURE=keys.public)
    assert outcome.code == 3


def test_a_change_during_the_load_is_refused(signed, keys, monkeypatch):
    real = signature.check_signature

    def late(folder, public_key):
        checked = real(folder, public_key)
        path = signed / "tokenizer.json"
        path.write_bytes(path.read_bytes())
        return checked

    monkeypatch.setattr(signature, "check_signature", late)
    outcome = llorch_here("generate", signed, *PROMPT, "--verify-signature", keys.public)
    assert (outcome.code, outcome.stdout) == (3, "")
    assert "changed between" in outcome.stderr


def test_what_no_signature_covers_is_refused(tiny_source, signed, keys):
    flags = ("--verify-signature", keys.public)
    outcome = llorch_here("generate", tiny_source, *PROMPT, *flags)
    assert (outcome.code, "is a source" in outcome.stderr) == (2, True)
    outcome = llorch_here("generate", signed, *PROMPT, *flags, TOKENIZER_PATH=signed)
    assert (outcome.code, "TOKENIZER_PATH" in outcome.stderr) == (2, True)
    outcome = llorch_here("generate", "--connect", "127.0.0.1:1", *PROMPT, *flags)
    assert (outcome.code, "--verify-signature" in outcome.stderr) == (2, True)


def test_the_package_that_is_missing_is_named(signed, keys, monkeypatch):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    for name in [name for name in sys.modules if name.startswith("model_signing.")]:
        monkeypatch.delitem(sys.modules, name)
    outcome = llorch_here("generate", signed, *PROMPT, "--verify-signature", keys.public)
    assert (outcome.code, "pip install 'llorch[signing]'" in outcome.stderr) == (4, True), outcome
    assert llorch_here("sign", signed, "--private-key", keys.private).code == 4


def test_an_encrypted_key_is_opened_by_the_environment(signed, tmp_path):
    keys = write_keys(tmp_path, "locked", password=b"secret")
    flags = ("sign", signed, "--private-key", keys.private)
    assert llorch_here(*flags).code == 2
    assert llorch_here(*flags, LLORCH_KEY_PASSWORD="secret").code == 0
