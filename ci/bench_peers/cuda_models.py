"""The models of ``ci/bench-cuda`` in the form that each engine takes, and the engines that run them.

An :class:`Entrant` makes its model when its turn comes, so that a converter that fails keeps nobody else from
running.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from bench_peers.contestant import Contestant
from bench_peers.models import build_genai, made, quantize, widen
from bench_peers.ours import Recipe
from bench_peers.peers import GENAI, LLAMA_CPP, Peer
from bench_peers.random_llama import LLAMA_1B, LLAMA_8B, WHOLE, Shape, write

PeerName = Literal["genai", "vllm", "llama.cpp"]
PEERS: Final[tuple[PeerName, ...]] = ("genai", "vllm", "llama.cpp")
SHAPES: Final[Mapping[str, Shape]] = {"1b": LLAMA_1B, "8b": LLAMA_8B}
MODELS: Final = ("smollm2", *SHAPES)
VLLM: Final = "vLLM"


@dataclass(frozen=True, slots=True)
class Entrant:
    """One engine with one model. make: the contestant, once its model is there; raises ResourceError if a
    converter fails. gives_logits: its divergence can be measured.
    """

    label: str
    make: Callable[[], Contestant]
    gives_logits: bool = True


@dataclass(frozen=True, slots=True)
class Forms:
    """One model's forms, each made when it is asked for first.

    gguf: the model itself, as it is found or drawn. folder: where all forms lie.
    pythons: interpreters, of ``llorch`` on CUDA and of the peers that are there.
    """

    gguf: Path
    folder: Path
    pythons: Mapping[str, Path]

    def entrants(self) -> list[Entrant]:
        """Return everyone who can run the model: ours first."""
        found = [Entrant(f"llorch, {kind}", functools.partial(self._ours, kind)) for kind in ("fp16", "int4")]
        if "genai" in self.pythons:
            found += [
                Entrant(f"{GENAI}, {kind}", functools.partial(self._genai, kind)) for kind in ("fp16", "int4")
            ]
        if "vllm" in self.pythons:
            found.append(Entrant(f"{VLLM}, fp16", self._vllm, gives_logits=False))
        if "llama.cpp" in self.pythons:
            found += [
                Entrant(f"{LLAMA_CPP}, {kind}", functools.partial(self._llama_cpp, kind))
                for kind in (WHOLE, "Q4_0")
            ]
        return found

    def _ours(self, kind: str) -> Recipe:
        flags = ("--target", "cuda", "--precision", kind)
        provider = f"cuda@{self.pythons['llorch']}"
        recipe = Recipe(f"llorch, {kind}", flags, self.folder / f"llorch-{kind}", provider)
        recipe.export(self.gguf)
        return recipe

    def _genai(self, kind: str) -> Peer:
        python, place = self.pythons["genai"], self.folder / f"genai-{kind}"
        checkpoint = self._checkpoint()
        made(place, lambda target: build_genai(python, checkpoint, target, "-p", kind, "-e", "cuda"))
        return Peer(f"{GENAI}, {kind}", "peer_genai", python, place, f"its model builder: {kind} for CUDA")

    def _vllm(self) -> Peer:
        return Peer(
            f"{VLLM}, fp16", "peer_vllm", self.pythons["vllm"], self._checkpoint(), "the weights in float16"
        )

    def _llama_cpp(self, kind: str) -> Peer:
        python, place = self.pythons["llama.cpp"], self.folder / f"llama.cpp-{kind}.gguf"
        made(place, functools.partial(quantize, python, self.gguf, kind=kind))
        return Peer(f"{LLAMA_CPP}, {kind}", "peer_llama_cpp", python, place, f"its own quantiser: {kind}")

    def _checkpoint(self) -> Path:
        place = self.folder / "hf"
        made(place, functools.partial(widen, self.gguf))
        return place


def forms(name: str, gguf: Path, cache: Path, pythons: Mapping[str, Path]) -> Forms:
    """Return the forms of one of :data:`MODELS`. gguf: SmolLM2, whose tokenizer random models take."""
    folder = cache / name
    if name in SHAPES:
        place = folder / "random.gguf"
        made(place, lambda target: write(SHAPES[name], target, gguf))
        gguf = place
    return Forms(gguf, folder, pythons)
