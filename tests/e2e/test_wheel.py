"""The built wheel in a bare virtual environment with the ``cpu`` extra only: what a worker's machine has."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from llorch_serve.artifact.folder import load_artifact
from support.builders.reference_files import own_reference
from support.builders.tiny_exports import random_ids
from support.harness.processes import llorch, serving
from support.harness.terminal import terminal

REPOSITORY = Path(__file__).parents[2]
ABSENT = ("torch", "transformers", "onnx", "onnx_ir", "safetensors", "gguf", "ml_dtypes", "prompt_toolkit")


def pip(python, *arguments):
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Python of the bare environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPOSITORY)
    (wheel,) = folder.glob("llorch-*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    pip(python, "install", "--quiet", "--constraint", REPOSITORY / "ci" / "constraints.txt", f"{wheel}[cpu]")
    return python


def run(python, code):
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_environment_is_bare(bare):
    code = f"import importlib.util as u; print([m for m in {ABSENT!r} if u.find_spec(m)])"
    assert run(bare, code).strip() == "[]"


def test_every_module_of_the_worker_imports(bare):
    extras = {
        ("cluster", "ray"),
        ("evaluation", "datasets"),
        ("evaluation", "lm_eval"),
        ("http", "python_multipart"),
        ("http", "starlette"),
        ("http", "uvicorn"),
        ("http", "h11"),  # uvicorn's own
        ("observe", "prometheus_client"),
        ("observe", "opentelemetry"),
        ("observe", "requests"),  # its exporter's own
        ("terminal", "starlette"),  # what a batch runs, which says so first
    }
    code = (
        f"EXTRAS = {extras!r}"
        + """
import importlib, pkgutil, llorch_serve
names = [m.name for m in pkgutil.walk_packages(llorch_serve.__path__, "llorch_serve.") if "__main__" not in m.name]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # of an extra, and in its modules alone
        assert (name.split(".")[1], error.name.split(".")[0]) in EXTRAS, (name, error.name)
print(llorch_serve.__file__, len(names))
"""
    )
    where, count = run(bare, code).split()
    assert where.startswith(str(bare.parents[1]))
    assert int(count) > 30


def test_the_wheel_brings_its_data(bare):
    code = """
from importlib.resources import files
from llorch_serve.bench.workload import sample_text
print(len(sample_text()), files("llorch_serve").joinpath("rpc/worker.proto").is_file(), files("llorch_serve").joinpath("py.typed").is_file(), files("llorch_export").joinpath("py.typed").is_file(), files("llorch_serve").joinpath("http/static/index.html").is_file(), files("llorch").joinpath("py.typed").is_file())
import llorch
assert llorch.load and llorch.connect
"""
    length, *present = run(bare, code).split()
    assert int(length) > 5000
    assert present == ["True"] * 5


def test_it_generates_text(bare, tiny):
    outcome = llorch("generate", tiny, "--prompt", "Paris", "--max-tokens", "8", "--json", python=bare)
    assert len(outcome.document()["token_ids"]) == 8


@pytest.mark.real_model
def test_it_generates_text_of_the_real_model(bare, smollm2):
    flags = ("--prompt", "The capital of France is", "--temperature", "0", "--max-tokens", "8", "--json")
    assert "Paris" in llorch("generate", smollm2("int8"), *flags, python=bare).document()["text"]


def test_it_serves(bare, tiny):
    with serving(tiny, python=bare) as worker:
        flags = ("--connect", worker.address, "--prompt", "Paris", "--max-tokens", "8", "--json")
        assert len(llorch("generate", *flags, python=bare).document()["token_ids"]) == 8
        script = bare.with_name("llorch")
        result = subprocess.run([script, "generate", *flags], capture_output=True, text=True, check=True)
        assert '"token_ids"' in result.stdout


@pytest.mark.parametrize(
    "command", [("export", "--output"), ("verify", "--against")], ids=["export", "verify"]
)
def test_what_needs_more_says_how_to_get_it(bare, tiny_source, tmp_path, command):
    name, flag = command
    outcome = llorch(name, tiny_source, flag, tmp_path / "other", python=bare)
    assert outcome.code == 4
    assert "pip install 'llorch[export]'" in outcome.error()
    assert list(tmp_path.iterdir()) == []


def test_structured_output_says_how_to_get_it(bare, tiny):
    flags = ("--prompt", "Paris", "--choice", "yes")
    outcome = llorch("generate", tiny, *flags, python=bare)
    assert outcome.code == 4
    assert "pip install 'llorch[structured]'" in outcome.error()
    with serving(tiny, python=bare) as worker:
        remote = llorch("generate", "--connect", worker.address, *flags, python=bare)
        assert remote.code == 4
        assert remote.error() == outcome.error()


def test_a_source_needs_the_exporter(bare, tiny_source, tmp_path):
    outcome = llorch("generate", tiny_source, "--prompt", "a", python=bare, LLORCH_CACHE=tmp_path)
    assert outcome.code == 4
    assert "pip install 'llorch[export]'" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "flags"), [("http", ("--http", "0")), ("otel", ("--otlp-endpoint", "http://127.0.0.1:9"))]
)
def test_a_worker_says_how_to_get_what_runs_beside_it(bare, tiny, extra, flags):
    outcome = llorch("serve", tiny, "--port", "0", *flags, python=bare)
    assert outcome.code == 4
    assert f"pip install 'llorch[{extra}]'" in outcome.error()


def test_chatting_at_a_terminal_says_how_to_get_it_and_in_a_pipe_works(bare, tiny):
    with terminal("chat", tiny, python=bare) as screen:
        screen.wait_for(r"pip install 'llorch\[chat\]'")
        assert screen.wait() == 4
    assert llorch("chat", tiny, python=bare).code == 0  # nothing is asked


def test_help_of_every_command_works(bare):
    for name in ("export", "verify", "inspect", "serve", "generate", "chat", "bench"):
        assert llorch(name, "--help", python=bare).code == 0


def test_fidelity_is_measured_from_a_reference_file(bare, tiny, tmp_path):
    own_reference(tmp_path / "ref", load_artifact(tiny), random_ids(100))
    document = llorch("verify", tiny, "--reference", tmp_path / "ref", "--json", python=bare).document()
    assert (
        document["prefill_kl"] < 2e-6 <= document["decode_kl"] < 0.01
    )  # the graph that the reference is of, and another
    assert document["tokens"] == 100


def test_an_artifact_is_shown_but_for_its_graph(bare, tiny):
    outcome = llorch("inspect", tiny, "--json", python=bare)
    assert outcome.document()["graph"] is None
    assert "pip install 'llorch[export]'" in outcome.stderr
