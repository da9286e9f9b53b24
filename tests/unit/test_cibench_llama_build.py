"""llama.cpp that this machine does not run: it is built again, build by build, and the table says which.

A shell script stands for the environment's interpreter: it is ended by a signal until pip has been told to
build as often as the test wants.
"""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from bench_peers import llama_build
from bench_peers.llama_build import BUILDS, require_working
from bench_peers.models import PeersFolder
from bench_peers.peers import llama_cpp
from bench_peers.processes import CrashError, first_output, run_process
from bench_peers.protocol import Measurement
from llorch_serve.errors import ResourceError

FOUND = json.dumps(asdict(Measurement("llama.cpp", "1", "w", 1, 512, 2, 100.0, 10.0)))
PYTHON = """#!/bin/sh
cd "$(dirname "$0")"
case "$*" in
*" pip install "*) echo "$CMAKE_ARGS|$*" >>pip ;;
*importlib.metadata*) echo 0.3.36 ;;
*peer_llama_cpp*) echo run >>runs; {dies} && kill -{signal} $$; echo '{found}' ;;
esac
"""
ONCE, TWICE, ALWAYS, NEVER = "[ ! -e pip ]", "! grep -q AMX pip", "true", "false"


def environment(folder: Path, dies: str, signal: str = "ILL") -> PeersFolder:
    peers = PeersFolder(folder)
    peers.main_python.parent.mkdir(parents=True)
    peers.main_python.write_text(PYTHON.format(dies=dies, signal=signal, found=FOUND))
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


@pytest.mark.parametrize("signal", ["ILL", "SEGV"])
@pytest.mark.parametrize(("dies", "builds"), [(ONCE, 1), (TWICE, 2)])
def test_a_crash_has_it_built_again_until_it_works_and_the_table_says_how(
    tmp_path: Path, dies: str, builds: int, signal: str
) -> None:
    peers = environment(tmp_path, dies, signal)
    said: list[str] = []
    require_working(peers, tmp_path / "m.gguf", said.append)
    names = ["native", *(build.how for build in BUILDS)]
    assert said == [
        f"llama.cpp, {before}, ends with SIG{signal}; it is compiled again: {after}"
        for before, after in list(itertools.pairwise(names))[:builds]
    ]
    calls = [line.partition("|") for line in lines(peers, "pip")]
    assert [args for args, _, _ in calls] == [build.cmake_args for build in BUILDS[:builds]]
    command = {"--no-cache-dir", "--force-reinstall", "llama-cpp-python==0.3.36"}
    assert all(command <= {*call.split()} for _, _, call in calls)
    made = llama_cpp(peers, tmp_path / "m.gguf", "Q4_1").made
    assert made == f"the GGUF file as it is (Q4_1), {names[builds]}"
    require_working(peers, tmp_path / "m.gguf", said.append)
    assert len(said) == len(lines(peers, "pip")) == builds, "what works is not built anew"


def test_the_first_build_keeps_amx_and_both_keep_what_else_is_native() -> None:
    first, last = ([*shlex.split(build.cmake_args)] for build in BUILDS)
    assert first == ["-DLLAVA_BUILD=OFF", "-DCMAKE_C_FLAGS=-fno-dse", "-DCMAKE_CXX_FLAGS=-fno-dse"]
    assert all("-U__AMX_INT8__" in option for option in last[1:])
    assert not any("GGML_NATIVE" in option for option in (*first, *last))


def test_a_library_that_crashes_in_every_build_is_told_in_a_line(tmp_path: Path) -> None:
    peers = environment(tmp_path, ALWAYS)
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(CrashError, match=r"^\S+python -c bench_peers.peer_llama_cpp was ended by SIGILL"):
            require_working(peers, tmp_path / "m.gguf", said.append)
    assert len(said) == len(lines(peers, "pip")) == len(BUILDS), "the second time it is not built again"


def test_another_failure_has_nothing_built(tmp_path: Path) -> None:
    peers = environment(tmp_path, "exit 3")
    with pytest.raises(ResourceError, match="ended with 3") as caught:
        require_working(peers, tmp_path / "m.gguf", lambda _line: None)
    assert not isinstance(caught.value, CrashError)
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
    assert len(said) == len(BUILDS) + 1
    assert all("SIGILL" in line for line in said)


def test_a_turn_that_crashes_is_told_by_its_signal() -> None:
    for run in (run_process, first_output):
        for name in ("ILL", "SEGV"):
            with pytest.raises(CrashError, match=f"^sh -c kill .* was ended by SIG{name}: it said") as caught:
                run("sh", "-c", f"kill -{name} $$")
            assert caught.value.signal == f"SIG{name}"
        with pytest.raises(ResourceError, match="was ended by SIGKILL: so far") as other:
            run("sh", "-c", "echo so far >&2; kill -KILL $$")
        assert not isinstance(other.value, CrashError)
