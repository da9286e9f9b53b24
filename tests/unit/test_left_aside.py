"""What an export leaves aside of a config.json stands in the manifest, in one notice each, and in inspect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.inspect.contents import contents
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.preview import preview
from llorch_export.source.open import open_checkpoint, open_config
from llorch_export.terminal.inspect import describe
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.errors import ArtifactError
from support.builders.adapters import write_adapter
from support.builders.checkpoints import tiny_llama_config, write_hf_folder
from support.builders.tiny_exports import silent

CODE = {"auto_map": {"AutoModelForCausalLM": "org/name--modeling_llama.LlamaForCausalLM"}}


def exported(path: Path, **settings: object) -> tuple[Path, tuple[str, ...]]:
    source = write_hf_folder(path / "model", settings)
    result = export(ExportOptions(source=str(source), output=path / "artifact", precision="fp32"), silent)
    return path / "artifact", result.notices


def test_settings_and_code_that_were_left_aside_are_told(tmp_path: Path) -> None:
    artifact, notices = exported(tmp_path, max_sequence_length=2048, badwordsids=[1], **CODE)
    manifest = load_artifact(artifact).manifest
    assert manifest.ignored_settings == ("badwordsids", "max_sequence_length")
    assert manifest.code_not_run == ("org/name/modeling_llama.py",)
    assert len(notices) == 2
    assert "ignored: badwordsids, max_sequence_length" in notices[0]
    assert "not run: org/name/modeling_llama.py" in notices[1]
    shown = describe(contents(load_artifact(artifact)))
    assert "ignored       badwordsids, max_sequence_length\n" in shown
    assert "code not run  org/name/modeling_llama.py\n" in shown


def test_a_manifest_with_nothing_to_tell_is_as_it_was(tmp_path: Path) -> None:
    artifact, notices = exported(tmp_path)
    data = json.loads((artifact / "llorch.json").read_bytes())
    assert not {"ignored_settings", "code_not_run"} & data.keys()
    assert notices == ()
    assert "ignored" not in describe(contents(load_artifact(artifact)))


def test_a_dry_run_tells_the_same(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "model", {"badwordsids": [1], **CODE})
    found = preview(ExportOptions(source=str(source), output=Path("nowhere"), precision="fp32"))
    assert len(found["notices"]) == 2  # type: ignore[arg-type]


def test_an_export_a_dry_run_and_an_artifact_that_stands_tell_the_same(tmp_path: Path) -> None:
    settings = {"add_eos_token": True, "auto_map": {"AutoTokenizer": ["x.Own", None]}}
    source = write_hf_folder(tmp_path / "model", {"badwordsids": [1], **CODE}, tokenizer_config=settings)
    adapter = tmp_path / "style"
    write_adapter(adapter, tiny_llama_config(), base_model_name_or_path="model")
    (adapter / "tokenizer.json").write_text("{}")
    options = ExportOptions(
        source=str(source),
        output=tmp_path / "out",
        precision="fp32",
        lora=(AdapterChoice(adapter),),
        if_changed=True,
    )
    planned = preview(options)["notices"]
    told = export(options, silent).notices
    again = export(options, silent)
    assert not again.changed
    assert planned == told == again.notices
    parts = ("badwordsids", "not run: org/name", "own code", "add_eos_token", "style: its tokenizer")
    assert all(part in notice for part, notice in zip(parts, told, strict=True))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        (
            "hf_quant_config.json",
            {
                "producer": {"name": "modelopt", "version": "0.23"},
                "quantization": {"quant_algo": "NVFP4", "group_size": 16, "rotation": "hadamard"},
            },
            "rotation",
        ),
        ("quantize_config.json", {"bits": 4, "quant_method": "eetq"}, "eetq"),
        ("quant_config.json", {"w_bit": 4, "version": "HYPER"}, "HYPER"),
    ],
)
def test_packing_that_is_told_beside_the_config_is_refused_before_a_tensor_is_read(
    tmp_path: Path, name: str, content: dict[str, object], named: str
) -> None:
    folder = write_hf_folder(tmp_path / "model")
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    for opened in (open_checkpoint, open_config):
        with pytest.raises(ArtifactError, match=f"{name}.*{named}"):
            opened(str(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}),
        ("quantize_config.json", {"bits": 4, "quant_method": "gptq"}),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}),
    ],
)
def test_settings_of_packing_beside_plain_weights_are_said_to_have_no_effect(
    tmp_path: Path, name: str, content: dict[str, object]
) -> None:
    folder = write_hf_folder(tmp_path / "model")
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (notice,) = open_checkpoint(str(folder)).notices
    assert notice == (
        f"the settings in {folder} say that weights are packed, and none is; they are read as they are"
    )


def test_names_in_a_manifest_make_no_lines_of_their_own(tmp_path: Path) -> None:
    artifact, _ = exported(tmp_path, badwordsids=[1])
    manifest = artifact / "llorch.json"
    data = json.loads(manifest.read_text())
    plain = len(describe(contents(load_artifact(artifact))).splitlines())
    manifest.write_text(json.dumps(data | {"ignored_settings": ["a\nsource        mine\x1b[2J"]}))
    shown = describe(contents(load_artifact(artifact)))
    assert len(shown.splitlines()) == plain
    assert "\x1b" not in shown


def test_an_absurd_number_of_named_tokens_is_refused(tmp_path: Path) -> None:
    names = {f"t{number}_token": "x" for number in range(257)}
    template = "".join(f"{{{{ {name} }}}}" for name in names)
    folder = write_hf_folder(tmp_path / "m", tokenizer_config={**names, "chat_template": template})
    with pytest.raises(ArtifactError, match="mentions 257 named tokens, expected at most 256"):
        open_checkpoint(str(folder))
