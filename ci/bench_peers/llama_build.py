"""The build of llama.cpp that this machine runs: the compiler's ``native``, or that without AMX.

pip compiles llama-cpp-python for every instruction set that the CPU names. Where a hypervisor names AMX and
does not let a guest run it, such a library ends with SIGILL. ``python -m bench_peers.llama_build FOLDER
GGUF``, which ``ci/peers`` runs, tries the library in the environment that was made, and compiles it again if
it must.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench_peers.models import PeersFolder
from bench_peers.peers import llama_cpp
from bench_peers.processes import IllegalInstructionError, run_process
from bench_peers.protocol import ProtocolError, Task, parse_measurements
from llorch_serve.errors import LlorchError
from llorch_serve.providers import usable_cpus
from llorch_serve.terminal.console import fail, say

WITHOUT_AMX: Final = "built without AMX, whose instructions end it on this machine"
"""What the record in the environment says, and the table."""

# GGML_AMX_INT8=OFF does nothing beside GGML_NATIVE, which keeps all other instruction sets: the code of AMX
# is there where the compiler's own macro is.
_UNDEFINED: Final = "-U__AMX_TILE__ -U__AMX_INT8__ -U__AMX_BF16__"
CMAKE_ARGS: Final = shlex.join(
    ("-DLLAVA_BUILD=OFF", f"-DCMAKE_C_FLAGS={_UNDEFINED}", f"-DCMAKE_CXX_FLAGS={_UNDEFINED}")
)
"""Those of ``ci/peers``, and AMX off."""
_PACKAGE: Final = "llama-cpp-python"


def require_working(peers: PeersFolder, gguf: Path, tell: Callable[[str], None] = say) -> None:
    """Try the library, and compile it again without AMX if it meets an illegal instruction.

    Raises IllegalInstructionError if it does without AMX too, ResourceError if it fails in another way or
    cannot be compiled.
    """
    try:
        _try(peers, gguf)
    except IllegalInstructionError as error:
        if peers.llama_build.exists():
            raise IllegalInstructionError(
                f"llama.cpp ends, {WITHOUT_AMX}, with SIGILL all the same"
            ) from error
        tell("llama.cpp's native build met an illegal instruction (SIGILL); it is built again without AMX")
        _build_without_amx(peers)
        _try(peers, gguf)


def _try(peers: PeersFolder, gguf: Path) -> None:
    """Run the work of a turn in short: a whole batch of a prompt, then steps of one and of 8 streams."""
    prompts = tuple((stream + 3, *range(100, 611)) for stream in range(8))
    task = Task(
        model=str(gguf), threads=usable_cpus(), prompts=prompts, new_tokens=2, streams=(1, 8), repeat=1
    )
    parse_measurements(llama_cpp(peers, gguf, "").answer(task))


def _build_without_amx(peers: PeersFolder) -> None:
    python = peers.main_python
    code = f"import importlib.metadata; print(importlib.metadata.version({_PACKAGE!r}))"
    version = run_process(python, "-I", "-c", code).strip()
    # A wheel that pip has compiled before lies in its cache, whatever it was compiled for.
    run_process(
        *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"),
        *("--force-reinstall", "--no-deps", "--no-binary", _PACKAGE, f"{_PACKAGE}=={version}"),
        CMAKE_ARGS=CMAKE_ARGS,
    )
    peers.llama_build.write_text(f"{WITHOUT_AMX}\n", encoding="ascii")


def main() -> None:
    """Make llama.cpp work in the folder, on the file, that the command line names."""
    folder, gguf = map(Path, sys.argv[1:])
    try:
        require_working(PeersFolder(folder), gguf)
    except LlorchError as error:
        sys.exit(fail(str(error), error.exit_code))
    except ProtocolError as error:
        sys.exit(fail(str(error), 1))


if __name__ == "__main__":
    main()
