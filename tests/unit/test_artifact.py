"""The artifact folder is believed only after it was checked: schema, sense, and every file inside and
whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llorch_serve.artifact.folder import MANIFEST_NAME, MAX_MANIFEST_BYTES, is_artifact, load_artifact
from llorch_serve.artifact.manifest import Manifest, decode_manifest, encode_manifest
from llorch_serve.errors import ArtifactError
from support.builders.tiny_artifact import CONTENT, tiny_manifest, write_tiny_artifact

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_artifact(tmp_path / "artifact")


def edited(folder: Path, edit: Edit) -> Path:
    path = folder / MANIFEST_NAME
    document = json.loads(path.read_bytes())
    edit(document)
    path.write_text(json.dumps(document))
    return folder


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        load_artifact(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_whole_artifact_loads(folder: Path) -> None:
    artifact = load_artifact(folder, verify_hashes=True)
    assert artifact.manifest == tiny_manifest()
    assert artifact.graph_path == folder / "model.onnx"
    assert artifact.tokenizer_path == folder / "tokenizer.json"
    assert artifact.chat_templates() == {"default": CONTENT["chat_template.jinja"].decode()}
    assert is_artifact(folder)
    assert not is_artifact(folder.parent)
    assert not is_artifact(folder / MANIFEST_NAME)


def test_no_template_is_none(folder: Path) -> None:
    artifact = load_artifact(edited(folder, lambda m: m.update(chat_template=None)))
    assert artifact.chat_templates() == {}


def test_a_template_that_is_no_text_is_refused(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_bytes(b"\xff" * len(CONTENT[path.name]))
    artifact = load_artifact(folder)
    with pytest.raises(ArtifactError, match="UTF-8"):
        artifact.chat_templates()


def test_a_manifest_is_the_same_bytes_each_time_and_reads_back() -> None:
    data = encode_manifest(tiny_manifest())
    assert data == encode_manifest(tiny_manifest())
    assert data.endswith(b"}\n")
    assert decode_manifest(data, origin="here") == tiny_manifest()


def test_what_is_no_artifact_says_how_to_make_one(tmp_path: Path) -> None:
    assert "llorch export" in refusal(tmp_path)
    assert "is not a folder" in refusal(tmp_path / "absent")
    file = tmp_path / "file"
    file.touch()
    assert "is not a folder" in refusal(file)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b"null", b"{", b"{}", b'{"schema_version": "1"}']
)
def test_garbage_is_no_manifest(folder: Path, content: bytes) -> None:
    (folder / MANIFEST_NAME).write_bytes(content)
    assert str(folder / MANIFEST_NAME) in refusal(folder)


def test_deeply_nested_json_is_an_error_like_any_other(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_bytes(b'{"schema_version": 1, "x": ' + b"[" * 100_000)
    refusal(folder)


def test_a_huge_manifest_is_refused_unread(folder: Path) -> None:
    with (folder / MANIFEST_NAME).open("r+b") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    assert str(MAX_MANIFEST_BYTES) in refusal(folder)


def test_a_newer_schema_is_refused_with_what_to_upgrade_whatever_else_it_holds(folder: Path) -> None:
    message = refusal(edited(folder, lambda m: m.update(schema_version=3, invention={"a": 1}, model=None)))
    assert "schema version 3" in message
    assert "pip install -U llorch" in message


@pytest.mark.parametrize("version", [0, -1])
def test_a_schema_version_that_never_was_is_refused(folder: Path, version: int) -> None:
    refusal(edited(folder, lambda m: m.update(schema_version=version)))


EDITS: dict[str, tuple[Edit, str]] = {
    "unknown field": (lambda m: m.update(shiny=1), "shiny"),
    "unknown field inside": (lambda m: m["kv"].update(shiny=1), "shiny"),
    "missing field": (lambda m: m.pop("kv"), "kv"),
    "text for a number": (lambda m: m.update(context_length="128"), "context_length"),
    "number for text": (lambda m: m.update(graph=3), "graph"),
    "unknown precision": (lambda m: m["recipe"].update(precision="int3"), "int3"),
    "limit of no divergence": (lambda m: m["recipe"].update(kl_limit=0.0), "kl_limit"),
    "architecture that is no name": (lambda m: m["model"].update(architecture="../gpt2"), "architecture"),
    "unknown type": (lambda m: m["inputs"][0].update(dtype="float8"), "float8"),
    "cache of another type": (lambda m: m["kv"].update(dtype="float16"), "KV cache in float16"),
    "no context": (lambda m: m.update(context_length=1), "context_length"),
    "huge context": (lambda m: m.update(context_length=2**40), "context_length"),
    "no layers": (lambda m: m["kv"].update(layers=0), "kv.layers"),
    "negative heads": (lambda m: m["kv"].update(kv_heads=-2), "kv.kv_heads"),
    "no vocabulary": (lambda m: m["model"].update(vocab_size=0), "vocab_size"),
    "negative size": (lambda m: m["files"][0].update(bytes=-1), "bytes"),
    "no hash": (lambda m: m["files"][0].update(sha256="abc"), "sha256"),
    "no version": (lambda m: m.update(min_onnxruntime="newest"), "min_onnxruntime"),
    "negative stop token": (lambda m: m.update(stop_token_ids=[-1]), "stop_token_ids"),
    "templates without a default": (
        lambda m: m.update(chat_template=None, other_chat_templates={"tool_use": "t.jinja"}),
        "chat templates tool_use beside a default one in None",
    ),
    "two default templates": (
        lambda m: m.update(chat_template="c.jinja", other_chat_templates={"default": "t.jinja"}),
        "the only default",
    ),
    "stop token outside": (lambda m: m.update(stop_token_ids=[1, 512]), "stop token 512"),
    "name with a width": (lambda m: m["kv"].update(past_name="{layer:>99999999999}.{kind}"), "past_name"),
    "name with an attribute": (lambda m: m["kv"].update(present_name="{layer.real}.{kind}"), "present_name"),
    "name that is not an input": (lambda m: m["kv"].update(past_name="cache.{layer}.{kind}"), "cache.0.key"),
    "a token in the place of messages": (
        lambda m: m.update(template_tokens={"messages": "x"}),
        "template_tokens",
    ),
    "a token without end": (lambda m: m.update(template_tokens={"pad_token": "x" * 4097}), "template_tokens"),
    "tokens without end": (
        lambda m: m.update(template_tokens={f"t{n}_token": "" for n in range(257)}),
        "template_tokens",
    ),
    "more layers than outputs": (lambda m: m["kv"].update(layers=2**31 - 1), "past_key_values.2.key"),
}


@pytest.mark.parametrize(("edit", "named"), EDITS.values(), ids=EDITS)
def test_what_does_not_fit_the_schema_is_refused_by_name(folder: Path, edit: Edit, named: str) -> None:
    message = refusal(edited(folder, edit))
    assert named in message
    assert "Export the model again" in message


def list_file(name: str, size: int = 5) -> Edit:
    return lambda m: m["files"].append({"path": name, "bytes": size, "sha256": "0" * 64})


@pytest.mark.parametrize(
    "name", ["../secret", "x/../../secret", "/etc/passwd", "..", "link", "linked/secret"]
)
def test_a_file_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    secret = folder.parent / "secret"
    secret.write_bytes(b"12345")
    (folder / "link").symlink_to(secret)
    (folder / "linked").symlink_to(folder.parent)
    message = refusal(edited(folder, list_file(name)))
    assert "outside the artifact's folder" in message or "is a link that leads out of its folder" in message


def test_an_absolute_path_is_refused_even_inside(folder: Path) -> None:
    assert "outside" in refusal(edited(folder, list_file(str(folder / "model.onnx"), 11)))


@pytest.mark.parametrize(
    "name", ["a\0b", "n" * 5000, "loop", "\ud800"], ids=["nul", "long", "loop", "surrogate"]
)
def test_a_path_that_the_system_cannot_follow_is_refused(folder: Path, name: str) -> None:
    (folder / "loop").symlink_to("loop")
    refusal(edited(folder, list_file(name)))


def test_links_that_stay_inside_are_files_like_others(folder: Path) -> None:
    (folder / "model.onnx").rename(folder / "blob")
    (folder / "model.onnx").symlink_to("blob")
    load_artifact(folder, verify_hashes=True)


def test_the_folder_itself_may_be_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    load_artifact(link, verify_hashes=True)


@pytest.mark.parametrize("field", ["graph", "tokenizer", "chat_template"])
def test_a_named_file_must_be_listed(folder: Path, field: str) -> None:
    (folder / "other").write_bytes(b"x")
    message = refusal(edited(folder, lambda m: m.update({field: "other"})))
    assert "other" in message
    assert "files" in message


@pytest.mark.parametrize("name", sorted(CONTENT))
def test_a_missing_or_cut_file_is_refused_by_name(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(CONTENT[name][:-1])
    message = refusal(folder)
    assert str(path) in message
    assert str(len(CONTENT[name])) in message
    assert str(len(CONTENT[name]) - 1) in message
    path.unlink()
    assert f"{path} is missing" in refusal(folder)
    path.mkdir()
    refusal(folder)


def test_a_changed_byte_is_found_when_hashes_are_verified(folder: Path) -> None:
    data = bytearray(CONTENT["model.onnx"])
    data[3] ^= 1
    (folder / "model.onnx").write_bytes(data)
    load_artifact(folder)
    message = refusal(folder, verify_hashes=True)
    assert str(folder / "model.onnx") in message
    assert "SHA-256" in message


def test_verifying_tells_every_byte_read(folder: Path) -> None:
    told: list[int] = []
    load_artifact(folder, verify_hashes=True, progress=told.append)
    assert sum(told) == sum(map(len, CONTENT.values()))


def test_a_manifest_cannot_be_changed_by_accident() -> None:
    with pytest.raises(AttributeError):
        tiny_manifest().graph = "other"  # type: ignore[misc]
    assert isinstance(msgspec.structs.replace(tiny_manifest(), graph="other"), Manifest)
