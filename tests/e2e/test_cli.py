"""The front door: help without heavy imports, exit codes by class, tracebacks only on request."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llorch_serve import cli
from support.harness.processes import environment, llorch, llorch_here

HEAVY = (
    "onnxruntime",
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "grpc",
    "safetensors",
    "gguf",
    "huggingface_hub",
)


# What an answer to a plain text has no use for, each some milliseconds of its command's start.
NOT_OF_TEXTS = (
    "asyncio",
    "google.protobuf",
    "grpc",
    "jinja2",
    "llguidance",
    "llorch_serve.chat.parsing.registry",
    "llorch_serve.chat.template",
    "llorch_serve.foreign.model",
    "llorch_serve.runtime.operator_check",
    "llorch_serve.runtime.shared_weights",
    "llorch_serve.stages.pipeline",
    "llorch_serve.text.control_tokens",
    "llorch_serve.structured.composing",
    "llorch_serve.worker.embedding_worker",
    "pydantic",
    "rich",
    "ssl",
)


def modules_after(*arguments, looked_for=HEAVY):
    """Run a command; return its exit code, stdout and which of the modules that are looked for it has
    imported.
    """
    code = (
        "import sys\n"
        f"sys.argv = {['llorch', *arguments]!r}\n"
        "from llorch_serve.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        f"    print('imported:', *[m for m in {looked_for!r} if m in sys.modules], file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment()
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_help_imports_nothing_heavy(command):
    code, stdout, stderr = modules_after(*([] if command is None else [command]), "--help")
    assert (code, stderr) == (0, "imported:\n")
    assert "Usage: llorch" in stdout
    expected = cli.COMMANDS if command is None else ["For example"]
    assert all(text in stdout for text in expected)


def test_a_heavy_import_would_be_noticed(tiny):
    _, _, stderr = modules_after("generate", str(tiny), "--prompt", "a", "--max-tokens", "1")
    assert "onnxruntime" in stderr


def test_an_answer_to_a_text_imports_nothing_that_it_has_no_use_for(tiny):
    asked = ("generate", str(tiny), "--max-tokens", "1")
    code, _, stderr = modules_after(*asked, "--prompt", "a", looked_for=NOT_OF_TEXTS)
    assert code == 0
    assert stderr.endswith("imported:\n")
    _, _, stderr = modules_after(*asked, "--chat", "a", looked_for=NOT_OF_TEXTS)
    assert "jinja2 llorch_serve.chat.parsing.registry llorch_serve.chat.template" in stderr


def test_version():
    outcome = llorch("--version")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("llorch 0.")


def test_an_unknown_command_is_a_usage_error():
    outcome = llorch_here("frobnicate")
    assert outcome.code == 2
    assert "frobnicate" in outcome.stderr


def test_an_unknown_option_is_a_usage_error():
    outcome = llorch_here("generate", "--frobnicate")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "--frobnicate" in outcome.stderr


def test_what_does_not_exist_is_named_without_a_traceback(tmp_path):
    for command in (
        ("generate", "--prompt", "a"),
        ("bench",),
        ("serve",),
        ("export", "-o", tmp_path / "out"),
    ):
        outcome = llorch_here(*command, tmp_path / "nowhere")
        assert outcome.code == 3
        assert str(tmp_path / "nowhere") in outcome.error()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_shows_the_traceback(tmp_path, how):
    arguments = ("generate", tmp_path, "--prompt", "a")
    outcome = llorch("--debug", *arguments) if how == "flag" else llorch(*arguments, LLORCH_DEBUG="1")
    lines = outcome.stderr.splitlines()
    assert outcome.code == 3
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("error: ")


def test_a_bug_is_one_line_too(monkeypatch):
    def bug():
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("llorch_serve.terminal.bench.command", bug)
    outcome = llorch_here("bench")
    assert outcome.code == 1
    assert "unexpected RuntimeError: two lines" in outcome.error()
    assert "--debug" in outcome.error()
