"""The examples of the documents do what the page says.

Each page is followed from its first example to its last, in a folder that has what they name: the real
model, or where a page says ``example: tiny`` a tiny one under the same names. Ports are replaced by free
ones. A command that ends with ``&`` is a worker, which serves before the page goes on. On the real model
every line that a page shows must be printed; numbers may be others, as times and sizes are.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.harness.documents import ROOT, Block, Command, commands, documents, examples
from support.harness.processes import PATIENCE_S, environment, llorch_here, running

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct"
ARTIFACT = "artifacts/smollm2"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="examples are written for bash")


def runnable(path: Path, comment: str) -> list[Block]:
    return [block for block in examples(path) if block.comment == comment]


def pages(comment: str) -> list[object]:
    """Return every document with examples that are run this way."""
    found = []
    for path in documents():
        if blocks := runnable(path, comment):
            text = "\n".join(line for block in blocks for line in block.lines)
            needs_torch = re.search(r"llorch (verify|frontier)", text)
            marks = [pytest.mark.reference] if needs_torch else []
            found.append(pytest.param(path, id=str(path.relative_to(ROOT)), marks=marks))
    return found


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command ``llorch``, as a wheel would install it."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "llorch"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llorch_serve "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, export_here: Callable[..., Path]
) -> Callable[..., Path]:
    """Return a function that makes a folder with a source's default artifact, once."""
    made: dict[Path, Path] = {}

    def export(source: Path) -> Path:
        if source not in made:
            made[source] = export_here(source, tmp_path_factory.mktemp("exported") / "artifact")
        return made[source]

    return export


@pytest.fixture
def follow(
    shim: Path, exported: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that runs a page's examples over a model."""
    monkeypatch.chdir(tmp_path)

    def run(blocks: list[Block], gguf: Path, folder: Path | None, *, compare: bool) -> None:
        shutil.copy(gguf, tmp_path / GGUF)
        if folder is not None:
            shutil.copytree(folder, tmp_path / FOLDER)
        lines = [line for block in blocks for line in block.lines]
        if not any(re.search(rf"export .*(-o|--output) {ARTIFACT}\b", line) for line in lines):
            shutil.copytree(exported(gguf), tmp_path / ARTIFACT, copy_function=os.link)
        Page(shim, compare=compare).follow(blocks)

    return run


class Page:
    """A page that is followed."""

    def __init__(self, shim: Path, *, compare: bool) -> None:
        self._compare = compare
        self._ports = {port: str(free_port()) for port in ("50051", "8080")}
        path = f"{shim}{os.pathsep}{os.environ['PATH']}"
        cache = str(Path.cwd() / "cache")
        self._settings = {"PATH": path, "LLORCH_PORT": self._ports["50051"], "LLORCH_CACHE": cache}

    def follow(self, blocks: list[Block]) -> None:
        """Run all commands; workers end with the page."""
        with contextlib.ExitStack() as workers:
            for block in blocks:
                for command in commands(block):
                    text = command.text.replace("\\\n", " ")
                    text = re.sub(r"\b(50051|8080)\b", lambda port: self._ports[port[0]], text)
                    if text.endswith("&"):
                        workers.enter_context(self._serving(text.removesuffix("&")))
                    else:
                        self._run(block, command, text)

    @contextlib.contextmanager
    def _serving(self, text: str) -> Iterator[None]:
        words = shlex.split(text)
        settings = dict(self._settings)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            settings[name] = value
        assert words.pop(0) == "llorch"
        with running(*words, **settings) as worker:
            worker.wait_for_line(r"^serving .* at ")
            yield

    def _run(self, block: Block, command: Command, text: str) -> None:
        code, output = self._outcome(text)
        where = f"{block.place}: {text}\n{output}"
        assert code == 0, where
        if self._compare:
            for line in command.expected:
                assert re.search(pattern(line), output, re.MULTILINE), f"{line!r} is missing: {where}"

    def _outcome(self, text: str) -> tuple[int, str]:
        if text.startswith("llorch ") and not re.search(r"[|<>;&]", text):
            # In this process, which saves imports.
            found = llorch_here(*shlex.split(text, comments=True)[1:], **self._settings)
            return found.code, found.stdout + found.stderr
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            encoding="utf-8",
            env=environment(**self._settings),
            timeout=PATIENCE_S,
        )
        return result.returncode, result.stdout


def pattern(line: str) -> str:
    """Return what matches a line of output, whatever its numbers are."""
    return "^" + r"\d+(?:\.\d+)?".join(map(re.escape, re.split(r"\d+(?:\.\d+)?", line.rstrip()))) + r"\s*$"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.real_model
@pytest.mark.parametrize("page", pages(""))
def test_examples_on_the_real_model(page: Path, follow: Callable[..., None], smollm2_gguf: Path) -> None:
    blocks = runnable(page, "")
    if any("curl" in line for block in blocks for line in block.lines) and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    follow(blocks, smollm2_gguf, None, compare=True)


@pytest.mark.parametrize("page", pages("example: tiny"))
def test_examples_on_a_tiny_model(
    page: Path, follow: Callable[..., None], tiny_gguf: Path, tiny_source: Path
) -> None:
    follow(runnable(page, "example: tiny"), tiny_gguf, tiny_source, compare=False)
