"""``--via optimum`` without Optimum: a script stands in for its interpreter, and writes a graph that is built
by hand.

``ci/test-optimum`` runs the real one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from llorch_export.adapter.choice import AdapterChoice
from llorch_export.optimum import interpreter
from llorch_export.optimum.export import export_via_optimum
from llorch_export.optimum.interpreter import find_optimum
from llorch_export.optimum.staging import known_config
from llorch_export.options import ExportOptions, Rule
from llorch_export.pipeline import ExportResult
from llorch_serve.artifact.folder import load_artifact
from llorch_serve.artifact.kinds import ModelKind
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, LlorchError, ProviderError, UsageError
from llorch_serve.loading.models import load_model, open_model
from llorch_serve.runtime.opening import open_session
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.foreign_folders import decoder, greedy, reference
from support.builders.tiny_exports import contents, silent
from support.harness.processes import llorch_here
from tolerances import FP32_LOGITS

VERSIONS = {"optimum-onnx": "0.1.0", "transformers": "4.57.6", "torch": "2.13.0", "onnx": "1.23.2"}
WRITES = (
    'for out; do :; done; mkdir "$out"; cp "$here/traced.onnx" "$out/model.onnx"; ls -a "$3" >"$here/seen"'
)

Stand = Callable[..., str]


@pytest.fixture(scope="module")
def traced() -> onnx.ModelProto:
    return decoder(fused=False, positions=True)


@pytest.fixture
def stand(tmp_path: Path, traced: onnx.ModelProto) -> Stand:
    """Return a function that makes an interpreter: it tells its versions, and runs ``script`` for Optimum's
    module.
    """

    def make(script: str = WRITES, versions: dict[str, str] = VERSIONS, model: Any = traced) -> str:
        onnx.save(model, tmp_path / "traced.onnx")
        path = tmp_path / "python"
        # It is asked with -c and code alone; the code that runs Optimum is followed by its module and what
        # that is told.
        probe = f"shift 2; if [ $# = 0 ]; then echo '{json.dumps(versions)}'; exit 0; fi"
        path.write_text(f"#!/bin/sh\nhere='{tmp_path}'\n{probe}\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def run(source: Path, output: Path, python: str, **options: Any) -> ExportResult:
    given = ExportOptions(source=str(source), output=output, precision="fp32", **options)
    return export_via_optimum(given, find_optimum(python), silent)


def test_the_graph_is_wrapped_as_an_artifact_that_says_whose_it_is(tmp_path: Path, stand: Stand) -> None:
    source = write_hf_folder(tmp_path / "model")
    result = run(source, tmp_path / "out", stand())
    manifest = load_artifact(tmp_path / "out", verify_hashes=True).manifest
    assert result.changed
    assert (manifest.layout, manifest.recipe.precision) == ("optimum", "fp32")
    assert VERSIONS.items() <= manifest.versions.items()
    assert {spec.name for spec in manifest.inputs} >= {"input_ids", "attention_mask", "position_ids"}
    listed = {entry.path for entry in manifest.files}
    assert listed == {"model.onnx", "model.onnx.data", "tokenizer.json", "chat_template.jinja"}
    assert set(contents(tmp_path / "out")) == listed | {"llorch.json"}


def test_it_is_served_with_the_limits_of_its_cache(tmp_path: Path, stand: Stand) -> None:
    source = write_hf_folder(tmp_path / "model")
    run(source, tmp_path / "out", stand())
    model = load_model(tmp_path / "out")
    assert model.kind is ModelKind.OPTIMUM
    session = open_model(model, SessionConfig(threads=1, slots=1), lambda report: None)
    assert not session.capabilities.batched_decode
    ids = [7, 300, 12, 45, 45, 2]
    found = session.prefill(0, ids, 0, range(len(ids)))
    np.testing.assert_allclose(found, reference(ids), atol=FP32_LOGITS, rtol=0)
    flags = (
        "--prompt-ids",
        ",".join(map(str, ids)),
        "--temperature",
        "0",
        "--max-tokens",
        "8",
        "--ignore-eos",
    )
    answer = llorch_here("generate", tmp_path / "out", *flags, "--json").document()
    assert answer["token_ids"] == greedy(ids, 8)


def test_commands_that_need_llorchs_own_graph_say_so(tmp_path: Path, stand: Stand) -> None:
    run(write_hf_folder(tmp_path / "model"), tmp_path / "out", stand())
    with pytest.raises(ArtifactError, match=r"holds a graph of optimum's.*verify --against"):
        open_session(load_artifact(tmp_path / "out"), SessionConfig(slots=1), lambda report: None)


def test_what_it_holds_is_shown(tmp_path: Path, stand: Stand) -> None:
    run(write_hf_folder(tmp_path / "model"), tmp_path / "out", stand())
    assert llorch_here("inspect", tmp_path / "out", "--json").document()["layout"] == "optimum"
    assert "traced by Optimum" in llorch_here("inspect", tmp_path / "out").stdout


@pytest.mark.reference
def test_verify_compares_it_with_the_reference(tmp_path: Path, stand: Stand) -> None:
    source = write_hf_folder(tmp_path / "model")
    run(source, tmp_path / "out", stand())
    found = llorch_here("verify", tmp_path / "out", "--against", source, "--json").document()
    assert found["passed"]
    assert found["same_source"]


def test_optimum_sees_the_config_and_the_weights_alone(tmp_path: Path, stand: Stand) -> None:
    source = write_hf_folder(tmp_path / "model", shards=2)
    (source / "modeling_llama.py").write_text("raise SystemExit('ran foreign code')")
    (source / "pytorch_model.bin").write_bytes(b"pickled")
    run(source, tmp_path / "out", stand())
    assert set((tmp_path / "seen").read_text().split()) - {".", ".."} == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }


def test_an_export_stands_until_source_or_versions_change(tmp_path: Path, stand: Stand) -> None:
    source, output = write_hf_folder(tmp_path / "model"), tmp_path / "out"
    assert run(source, output, stand(), if_changed=True).changed
    assert not run(source, output, stand(), if_changed=True).changed
    assert run(source, output, stand(versions={**VERSIONS, "torch": "2.14.0"}), if_changed=True).changed
    write_hf_folder(source, seed=1)
    assert run(source, output, stand(), if_changed=True).changed


def test_what_was_left_aside_of_config_and_tokenizer_is_told(tmp_path: Path, stand: Stand) -> None:
    settings = {"auto_map": {"AutoTokenizer": ["x.Own", None]}}
    source = write_hf_folder(tmp_path / "model", {"badwordsids": [1]}, tokenizer_config=settings)
    first = run(source, tmp_path / "out", stand(), if_changed=True)
    assert len(first.notices) == 2
    assert "badwordsids" in first.notices[0]
    assert "tokenizer's own code" in first.notices[1]
    again = run(source, tmp_path / "out", stand(), if_changed=True)
    assert (again.changed, again.notices) == (False, first.notices)


# Failures leave nothing behind.


def refused(
    source: Path, output: Path, python: str, message: str, kind: type[LlorchError], **given: Any
) -> None:
    with pytest.raises(kind, match=message) as caught:
        run(source, output, python, **given)
    assert "\n" not in str(caught.value)
    assert not output.exists()
    assert not [path for path in output.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo Traceback; echo 'ValueError: no such architecture' >&2; echo; exit 3",
            "3: ValueError: no such",
        ),
        ("exit 1", "it said nothing"),
        ("exit 0", "wrote nothing, expected"),
        (
            'for out; do :; done; mkdir "$out"; touch "$out/decoder_model.onnx"',
            r"decoder_model.onnx, expected",
        ),
    ],
)
def test_its_failure_is_told_in_its_own_words(
    tmp_path: Path, stand: Stand, script: str, message: str
) -> None:
    refused(write_hf_folder(tmp_path / "model"), tmp_path / "out", stand(script), message, ArtifactError)


def test_it_may_not_take_forever(tmp_path: Path, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_EXPORT_LIMIT_S", 0.2)
    python = stand("exec cat /dev/zero >/dev/null")
    refused(
        write_hf_folder(tmp_path / "model"), tmp_path / "out", python, "not done after 0.2 s", ArtifactError
    )


def test_a_graph_without_cache_or_of_other_sizes_is_refused(tmp_path: Path, stand: Stand) -> None:
    source, output = write_hf_folder(tmp_path / "model"), tmp_path / "out"
    bare = decoder(fused=False, positions=True)
    del bare.graph.output[1:]
    refused(source, output, stand(model=bare), "too many or too few: present.0.key", ArtifactError)
    wide = decoder(fused=False, positions=True)
    wide.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 511
    refused(source, output, stand(model=wide), r"logits of shape .*511\], expected \[512\]", ArtifactError)
    half = decoder(fused=False, positions=True, half=True)
    refused(source, output, stand(model=half), "of type FLOAT16", ArtifactError)


def test_options_that_optimum_cannot_follow_are_refused(tmp_path: Path, stand: Stand) -> None:
    source, output, python = write_hf_folder(tmp_path / "model"), tmp_path / "out", stand()
    refused(
        source,
        output,
        python,
        "--lora .* has no effect with --via",
        UsageError,
        lora=(AdapterChoice(tmp_path),),
    )
    refused(source, output, python, "--interop genai has no effect", UsageError, interop="genai")
    no_effect: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--transform rotate", {"transforms": ("rotate",)}),
        ("--calibration ", {"calibration": tmp_path}),
        ("--activations row", {"activations": "row"}),
        ("--head-precision int8", {"head_precision": "int8"}),
        (r"--recipe \(rule 1\)", {"rules": (Rule(("*",), precision="int8", label="rule 1"),)}),
    )
    for words, given in no_effect:
        refused(source, output, python, f"{words}.* has no effect with --via", UsageError, **given)
    with pytest.raises(UsageError, match="--precision int8 cannot be had"):
        export_via_optimum(ExportOptions(str(source), output, "int8"), find_optimum(python), silent)


def test_sources_that_optimum_cannot_read_are_refused(tmp_path: Path, stand: Stand) -> None:
    output, python = tmp_path / "out", stand()
    refused(write_gguf(tmp_path / "m.gguf"), output, python, "is a GGUF file.*leave --via out", UsageError)
    quantised = write_hf_folder(tmp_path / "model", {"quantization_config": {"quant_method": "fp8"}})
    refused(quantised, output, python, "has a quantization_config; leave --via out", UsageError)


def test_an_interpreter_without_it_is_refused_with_the_pip_line(stand: Stand) -> None:
    with pytest.raises(ProviderError, match=r"has no optimum-onnx.*pip install torch optimum-onnx"):
        find_optimum(stand(versions={"torch": "2.13.0"}))


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false", os.devnull])
def test_what_is_no_interpreter_is_refused(python: str) -> None:
    with pytest.raises(UsageError, match=f"--optimum-python {python} is not a Python interpreter"):
        find_optimum(python)


def test_this_interpreter_is_asked_by_default(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", stand())
    assert find_optimum(None).python == sys.executable


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--optimum-python", "python3"), "has no effect without --via optimum"),
        (("--via", "optimum", "--dry-run"), "--dry-run describes llorch's own graph"),
        (("--via", "optimum", "--optimum-python", "/no/such"), "is not a Python interpreter"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    source = write_hf_folder(tmp_path / "model")
    outcome = llorch_here("export", source, "--output", tmp_path / "out", *flags)
    assert outcome.code == 2
    assert message in outcome.error()


# Configs of transformers 5, in the words of 4.


def test_rotary_settings_go_where_transformers_4_looks() -> None:
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}}
    assert known_config(new) == {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": None}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert known_config({"rope_parameters": {**yarn, "rope_theta": 1e4}}) == {
        "rope_theta": 1e4,
        "rope_scaling": yarn,
    }
    old = {"rope_theta": 1e4, "rope_scaling": yarn}
    assert known_config(old) == old


def test_code_is_not_named() -> None:
    assert known_config({"auto_map": {"AutoModel": "evil.Model"}, "vocab_size": 5}) == {"vocab_size": 5}
