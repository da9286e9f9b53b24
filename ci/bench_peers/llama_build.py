"""The build of llama.cpp that this machine runs: the compiler's ``native``, or the next one that does.

pip compiles llama-cpp-python for every instruction set that the CPU names. With AMX such a library may end
with SIGILL or SIGSEGV: GCC 12 takes ``_tile_loadconfig`` for an instruction that reads 8 of its 64 bytes, and
drops the writes of the others, so that tiles have whatever shapes lay there. ``python -m
bench_peers.llama_build FOLDER GGUF``, which ``ci/peers`` runs, tries the library in the environment that was
made, and compiles it again if it must.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench_peers.cli import exit_if_refused
from bench_peers.models import PeersFolder
from bench_peers.peers import llama_cpp
from bench_peers.processes import CrashError, run_process
from bench_peers.protocol import Task, parse_measurements
from llorch_serve.providers import usable_cpus
from llorch_serve.terminal.console import say


@dataclass(frozen=True, slots=True)
class Build:
    """Another build. how: in words, for the record and the table. flags: the compiler's."""

    how: str
    flags: str

    @property
    def cmake_args(self) -> str:
        """Those of ``ci/peers``, and the flags."""
        flags = (f"-DCMAKE_C_FLAGS={self.flags}", f"-DCMAKE_CXX_FLAGS={self.flags}")
        return shlex.join(("-DLLAVA_BUILD=OFF", *flags))


BUILDS: Final = (
    Build("built with -fno-dse, without which AMX ends it on this machine", "-fno-dse"),
    # GGML_AMX_INT8=OFF does nothing beside GGML_NATIVE, which keeps all other instruction sets: the code of
    # AMX is there where the compiler's own macro is.
    Build("built without AMX, which ends it on this machine", "-U__AMX_TILE__ -U__AMX_INT8__ -U__AMX_BF16__"),
)
"""What is tried when the native build crashes, in this order: the first keeps AMX."""
_PACKAGE: Final = "llama-cpp-python"


def require_working(peers: PeersFolder, gguf: Path, tell: Callable[[str], None] = say) -> None:
    """Try the library, and compile it anew, build by build, while it crashes.

    Raises CrashError if the last build does too, ResourceError if it fails in another way or cannot be
    compiled.
    """
    record = peers.llama_build
    now = record.read_text(encoding="ascii").strip() if record.exists() else "native"
    names = ["native", *(build.how for build in BUILDS)]
    for build in BUILDS[names.index(now) :]:
        try:
            _try(peers, gguf)
        except CrashError as error:
            tell(f"llama.cpp, {now}, ends with {error.signal}; it is compiled again: {build.how}")
            _compile(peers, build)
            now = build.how
        else:
            return
    _try(peers, gguf)


def _try(peers: PeersFolder, gguf: Path) -> None:
    """Run the work of a turn in short: a whole batch of a prompt, then steps of one and of 8 streams."""
    prompts = tuple((stream + 3, *range(100, 611)) for stream in range(8))
    task = Task(
        model=str(gguf), threads=usable_cpus(), prompts=prompts, new_tokens=2, streams=(1, 8), repeat=1
    )
    parse_measurements(llama_cpp(peers, gguf, "").answer(task))


def _compile(peers: PeersFolder, build: Build) -> None:
    python = peers.main_python
    code = f"import importlib.metadata; print(importlib.metadata.version({_PACKAGE!r}))"
    version = run_process(python, "-I", "-c", code).strip()
    # A wheel that pip has compiled before lies in its cache, whatever it was compiled for.
    run_process(
        *(python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"),
        *("--force-reinstall", "--no-deps", "--no-binary", _PACKAGE, f"{_PACKAGE}=={version}"),
        CMAKE_ARGS=build.cmake_args,
    )
    peers.llama_build.write_text(f"{build.how}\n", encoding="ascii")


def main() -> None:
    """Make llama.cpp work in the folder, on the file, that the command line names."""
    folder, gguf = map(Path, sys.argv[1:])
    exit_if_refused(lambda: require_working(PeersFolder(folder), gguf))


if __name__ == "__main__":
    main()
