"""The peers: llama.cpp, onnxruntime-genai and OpenVINO GenAI, each in its own environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench_peers.contestant import Closeness, Work
from bench_peers.models import PeersFolder
from bench_peers.processes import first_output, run_process
from bench_peers.protocol import Measurement, Task, encode, parse_measurements
from llorch_serve.errors import ArtifactError
from llorch_serve.fidelity.divergence import DivergenceSum
from llorch_serve.fidelity.reference_file import ReferenceFile
from llorch_serve.python_child import foreign_module_command

LLAMA_CPP: Final = "llama.cpp"
GENAI: Final = "onnxruntime-genai"
OPENVINO: Final = "OpenVINO GenAI"

_ROOM: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer. module: its process. most_streams: how many it runs at once; None for any number.

    cache: type of its KV cache, as it names it; empty: its default.
    """

    label: str
    module: str
    python: Path
    model: Path
    made: str
    most_streams: int | None = None
    cache: str = ""

    @property
    def ours(self) -> bool:
        """No."""
        return False

    def measure(self, work: Work) -> list[Measurement]:
        """See :class:`bench_peers.contestant.Contestant`; numbers of streams that it does not run are left
        out.
        """
        streams = tuple(
            count for count in work.streams if self.most_streams is None or count <= self.most_streams
        )
        # The first token of each prompt is another one, as in llorch bench, so that no stream can use
        # another's prefix.
        prompts = tuple((stream + 3, *work.prompt_ids[1:]) for stream in range(max(streams)))
        task = Task(
            model=str(self.model),
            threads=work.threads,
            prompts=prompts,
            new_tokens=work.new_tokens,
            streams=streams,
            repeat=work.repeat,
            filled=work.filled,
            warm_up=work.warm_up,
            cache=self.cache,
        )
        return parse_measurements(self.answer(task))

    def closeness(self, reference: ReferenceFile, scratch: Path, threads: int) -> Closeness:
        """See :class:`bench_peers.contestant.Contestant`."""
        file = scratch / f"{self.module}.npy"
        ids = reference.header.token_ids
        self.answer(
            Task(
                model=str(self.model),
                threads=threads,
                cache=self.cache,
                logits_of=ids,
                logits_file=str(file),
            )
        )
        try:
            return compare(file, reference)
        finally:
            file.unlink()

    def first_token_s(self, text: str, threads: int) -> float:
        """See :class:`bench_peers.contestant.Contestant`."""
        task = Task(model=str(self.model), threads=threads, text=text)
        return first_output(*self._command(), stdin=encode(task), python_path=(_ROOM,)).first_s

    def answer(self, task: Task) -> str:
        """Return what the peer's process prints for a task. Raises as ``measure``."""
        return run_process(*self._command(), stdin=encode(task), python_path=(_ROOM,))

    def _command(self) -> list[str]:
        return foreign_module_command(str(self.python), f"bench_peers.{self.module}")


def compare(file: Path, reference: ReferenceFile) -> Closeness:
    """Compare logits in a .npy file with a reference. Raises ArtifactError if they are not of its text."""
    found = np.load(file, mmap_mode="r")
    expected = (len(reference.header.token_ids), reference.header.vocab_size)
    if found.shape != expected:
        raise ArtifactError(f"a peer gave logits {found.shape} where the text has {expected}")
    total = DivergenceSum()
    for start, wanted in reference.chunks():
        total.add(wanted, np.array(found[start : start + len(wanted)], np.float32))
    figures = total.result()
    return Closeness(figures.kl, figures.top1)


def llama_cpp(folder: PeersFolder, gguf: Path, kind: str) -> Peer:
    """Return llama.cpp on a file of the type ``kind``."""
    built = folder.llama_build
    how = f", {built.read_text(encoding='ascii').strip()}" if built.exists() else ""
    return Peer(
        label=LLAMA_CPP,
        module="peer_llama_cpp",
        python=folder.main_python,
        model=gguf,
        made=f"the GGUF file as it is ({kind}){how}",
    )


def openvino(folder: PeersFolder) -> Peer:
    """Return OpenVINO GenAI on what optimum-intel made."""
    return Peer(
        label=OPENVINO,
        module="peer_openvino",
        python=folder.openvino_python,
        model=folder.openvino,
        made="optimum-intel: int4, groups of 64, symmetric",
    )


def genai(folder: PeersFolder, model: Path, made: str) -> Peer:
    """Return onnxruntime-genai on a folder of its own form."""
    return Peer(
        label=GENAI,
        module="peer_genai",
        python=folder.main_python,
        model=model,
        made=f"{made} (one stream: it does not batch requests on a CPU)",
        most_streams=1,
    )


def all_peers(folder: PeersFolder, gguf: Path) -> list[Peer]:
    """Return every peer of ``ci/bench``. Raises UsageError if one has not been set up."""
    folder.require()
    built = "its model builder: int4, blocks of 32, accuracy level 4"
    return [
        llama_cpp(folder, gguf, "Q4_1"),
        genai(folder, folder.genai, built),
        openvino(folder),
    ]
