"""What a worker holds in memory, by kind, alone and beside three others of the same artifact.

    ci/measurement memory ARTIFACT [FLAG...]           flags of ``llorch serve``: --single-graph
    ci/measurement memory PYTHON FILE.gguf             llama.cpp, by an interpreter that has llama-cpp-python

Each process answers one prompt of 300 tokens with 32. Resident memory counts a page of a file in every
process that maps it, and twice in one that maps it twice; the proportional set size shares such a page out
among those who map it, so that the sizes of all processes add up to what the machine holds.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.files.cache import cache_folder
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.harness.processes import serving

PROCESSES = 4
CONTEXT = 2048
PROMPT_TOKENS = 300
NEW_TOKENS = 32
PROMPT = tuple(100 + place % 400 for place in range(PROMPT_TOKENS))
_LLAMA_CPP = Path(__file__).with_name("run_llamacpp.py")


@dataclass(frozen=True, slots=True)
class Held:
    """MiB of one process, or summed over several.

    peak: most that was resident at once. resident: now. proportional: now, with shared pages shared out; of
    it ``weights`` are pages of the model's files, ``own`` what belongs to no file (packed weights, caches,
    Python's objects), ``libraries`` all other files.
    """

    peak: float
    resident: float
    proportional: float
    weights: float
    own: float
    libraries: float


def held(pid: int, models: Sequence[Path]) -> Held:
    """Return what a process holds. models: folders and files that weights are mapped from."""
    proc = Path("/proc") / str(pid)
    kinds = {"weights": 0.0, "own": 0.0, "libraries": 0.0}
    kind = "own"
    for line in proc.joinpath("smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        head, *rest = line.split(maxsplit=5)
        if not head.endswith(":"):
            name = rest[4] if len(rest) > 4 else ""
            of_model = any(name == str(model) or name.startswith(f"{model}/") for model in models)
            kind = "weights" if of_model else "libraries" if name.startswith("/") else "own"
        elif head == "Pss:":
            kinds[kind] += int(rest[0]) / 2**10
    status = dict(
        line.split(":", 1) for line in proc.joinpath("status").read_text(encoding="utf-8").splitlines()
    )
    peak, resident = (int(status[name].split()[0]) / 2**10 for name in ("VmHWM", "VmRSS"))
    return Held(peak, resident, sum(kinds.values()), **kinds)


@contextlib.contextmanager
def worker(folder: Path, flags: Sequence[str]) -> Iterator[int]:
    """Run ``llorch serve`` with one slot, from its first answer on; give its process."""
    cache = {"LLORCH_CACHE": cache_folder()}
    with serving(folder, "--slots", 1, "--max-context", CONTEXT, *flags, **cache) as process:
        with WorkerClient(process.address) as client:
            sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
            list(client.generate(GenerationRequest("first", TokenPrompt(PROMPT), sampling)))
        yield process.command.process.pid


@contextlib.contextmanager
def llama_cpp(python: str, file: Path) -> Iterator[int]:
    """Run llama.cpp from its first answer on; give its process."""
    command = [python, str(_LLAMA_CPP), "held", str(file), str(CONTEXT), str(NEW_TOKENS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(*PROMPT, file=process.stdin, flush=True)
        if process.stdout.readline().strip() != "held":
            raise RuntimeError(f"{python} did not run {file}")
        yield process.pid
        process.stdin.close()


def row(name: str, found: Held) -> str:
    """Return a line of the table."""
    values = (getattr(found, field.name) for field in fields(Held))
    return f"| {name} | {' | '.join(f'{value:.0f}' for value in values)} |"


def main(arguments: Sequence[str]) -> None:
    """Measure and print a table."""
    first, *rest = arguments
    lines = ["| | peak | resident | proportional | weights | own | libraries |", "|---|" + "---|" * 6]
    with contextlib.ExitStack() as running:
        pids: list[int] = []
        alone = 0.0
        files = (Path(name).resolve() for name in rest if name.endswith(".gguf"))
        models = [cache_folder() / "weights", Path(first).resolve(), *files]
        for number in range(1, PROCESSES + 1):
            peer = len(models) > 2
            process = llama_cpp(first, models[2]) if peer else worker(Path(first), rest)
            pids.append(running.enter_context(process))
            every = [held(pid, models) for pid in pids]
            together = Held(*(sum(getattr(one, field.name) for one in every) for field in fields(Held)))
            if number == 1:
                alone = together.proportional
            if number in (1, PROCESSES):
                lines.append(row("alone" if number == 1 else f"{number} processes", together))
        further = (together.proportional - alone) / (PROCESSES - 1)
    print("\n".join(lines))  # noqa: T201 - a script's output
    print(f"\neach further process: {further:.0f} MiB, {further / alone:.2f} of the first")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
