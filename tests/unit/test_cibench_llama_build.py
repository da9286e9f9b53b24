"""llama.cpp that this machine does not run: it is built again without AMX, once, and the table says so.

A shell script stands for the environment's interpreter: it is ended by SIGILL until pip has been told to
build without AMX.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from bench_peers import llama_build
from bench_peers.llama_build import CMAKE_ARGS, require_working
from bench_peers.models import PeersFolder
from bench_peers.peers import llama_cpp
from bench_peers.processes import IllegalInstructionError, first_output_s, run_process
from bench_peers.protocol import Measurement
from llorch_serve.errors import ResourceError

FOUND = json.dumps(asdict(Measurement("llama.cpp", "1", "w", 1, 512, 2, 100.0, 10.0)))
PYTHON = """#!/bin/sh
cd "$(dirname "$0")"
case "$*" in
*" pip install "*) echo "$CMAKE_ARGS|$*" >>pip ;;
*importlib.metadata*) echo 0.3.36 ;;
*peer_llama_cpp*) echo run >>runs; {dies} && kill -ILL $$; echo '{found}' ;;
esac
"""
ONCE, ALWAYS, NEVER = "[ ! -e pip ]", "true", "false"


def environment(folder: Path, dies: str) -> PeersFolder:
    peers = PeersFolder(folder)
    peers.main_python.parent.mkdir(parents=True)
    peers.main_python.write_text(PYTHON.format(dies=dies, found=FOUND))
    peers.main_python.chmod(0o755)
    return peers


def lines(peers: PeersFolder, name: str) -> list[str]:
    file = peers.main_python.parent / name
    return file.read_text().splitlines() if file.exists() else []


def test_a_build_that_works_is_left_alone(tmp_path: Path) -> None:
    peers = environment(tmp_path, NEVER)
    said: list[str] = []
    require_working(peers, tmp_path / "m.gguf", said.append)
    assert (said, lines(peers, "pip"), lines(peers, "runs")) == ([], [], ["run"])
    assert llama_cpp(peers, tmp_path / "m.gguf", "Q4_1").made == "the GGUF file as it is (Q4_1)"


def test_an_illegal_instruction_has_it_built_again_without_amx_and_the_table_says_so(tmp_path: Path) -> None:
    peers = environment(tmp_path, ONCE)
    said: list[str] = []
    require_working(peers, tmp_path / "m.gguf", said.append)
    assert said == [
        "llama.cpp's native build met an illegal instruction (SIGILL); it is built again without AMX"
    ]
    ((args, _, command),) = [line.partition("|") for line in lines(peers, "pip")]
    assert args == CMAKE_ARGS
    # The other instruction sets stay: it is still the native build.
    assert [option.partition("=")[0] for option in shlex.split(args) if "-U__AMX_INT8__" in option] == [
        "-DCMAKE_C_FLAGS",
        "-DCMAKE_CXX_FLAGS",
    ]
    assert "GGML_NATIVE" not in args
    assert {"--no-cache-dir", "--force-reinstall", "llama-cpp-python==0.3.36"} <= {*command.split()}
    made = llama_cpp(peers, tmp_path / "m.gguf", "Q4_1").made
    assert (
        made == "the GGUF file as it is (Q4_1), built without AMX, whose instructions end it on this machine"
    )
    require_working(peers, tmp_path / "m.gguf", said.append)
    assert len(said) == len(lines(peers, "pip")) == 1, "what works is not built anew"


def test_a_library_that_ends_without_amx_too_is_told_in_a_line(tmp_path: Path) -> None:
    peers = environment(tmp_path, ALWAYS)
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(IllegalInstructionError, match=r"SIGILL"):
            require_working(peers, tmp_path / "m.gguf", said.append)
    assert len(said) == len(lines(peers, "pip")) == 1, "the second time it is not built again"


def test_another_failure_has_nothing_built(tmp_path: Path) -> None:
    peers = environment(tmp_path, "exit 3")
    with pytest.raises(ResourceError, match="ended with 3") as caught:
        require_working(peers, tmp_path / "m.gguf", lambda _line: None)
    assert not isinstance(caught.value, IllegalInstructionError)
    assert not lines(peers, "pip")


def test_the_command_says_it_in_one_line_and_ends_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment(tmp_path, ALWAYS)
    monkeypatch.setattr("sys.argv", ["llama_build", str(tmp_path), str(tmp_path / "m.gguf")])
    with pytest.raises(SystemExit) as caught:
        llama_build.main()
    assert caught.value.code == ResourceError.exit_code
    said = capsys.readouterr().err.splitlines()
    assert [("SIGILL" in line) for line in said] == [True, True]


def test_a_turn_that_meets_an_illegal_instruction_is_told_by_name() -> None:
    for run in (run_process, first_output_s):
        with pytest.raises(IllegalInstructionError, match=r"^sh -c kill .* met an illegal instruction"):
            run("sh", "-c", "kill -ILL $$")
        with pytest.raises(ResourceError, match="was ended by SIGKILL: so far"):
            run("sh", "-c", "echo so far >&2; kill -KILL $$")
