"""The modules of a model, by the names that adapters know them under.

A family whose own code fuses projections (Phi-3) has each of them under two names: adapters are trained on
the fused form, or on a form of the model that keeps them apart, as the tensors here are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llorch_export.checkpoint.names import EMBEDDING, HEAD, family_name
from llorch_export.config.families import FAMILIES, FUSED_MODULES
from llorch_export.formats.module import is_expert, is_router
from llorch_serve.artifact.manifest import LlamaConfig

EMBEDDING_MODULE: Final = EMBEDDING.removesuffix(".weight")
HEAD_MODULE: Final = HEAD.removesuffix(".weight")
TABLES: Final = (EMBEDDING, HEAD)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the model, and which rows of a module's weight it is; stop None: all of them."""

    module: str
    start: int = 0
    stop: int | None = None


class ModelModules:
    """The modules of a model, under the names that its own code and its unfused form give them.

    shapes: of the tensors by name; a tied head has the embedding's.
    """

    def __init__(self, config: LlamaConfig, shapes: Shapes) -> None:
        self.shapes = {HEAD: shapes[EMBEDDING], **shapes}
        family = FAMILIES[config.architecture]
        self._own: dict[str, str] = {}
        for name in self.shapes:
            module = name.rpartition(".")[0]
            stored = family_name(name, family).rpartition(".")[0]
            if stored != module:
                self._own[stored] = module
        self._fused: dict[str, tuple[Piece, ...]] = {}
        for layer in range(config.num_hidden_layers):
            for name in FAMILIES[config.architecture].fused:
                prefix, start, pieces = f"model.layers.{layer}.", 0, []
                for part in FUSED_MODULES[name]:
                    stop = start + self.shapes[f"{prefix}{part}.weight"][0]
                    pieces.append(Piece(f"{prefix}{part}", start, stop))
                    start = stop
                self._fused[f"{prefix}{name}"] = tuple(pieces)

    def pieces(self, module: str) -> tuple[Piece, ...]:
        """Return what a module's weight consists of; empty if there is no such module."""
        module = self._own.get(module, module)
        if module in self._fused:
            return self._fused[module]
        return (Piece(module),) if f"{module}.weight" in self.shapes else ()

    def weight_shape(self, module: str) -> tuple[int, ...]:
        """Return the shape of a module's weight."""
        pieces = self.pieces(module)
        first = self.shapes[f"{pieces[0].module}.weight"]
        return first if pieces[-1].stop is None else (pieces[-1].stop, *first[1:])

    def targetable(self, adapted: set[str]) -> set[str]:
        """Return the modules that factors may be for, by the names that ``adapted`` uses if it does."""
        found = {name.removesuffix(".weight") for name, shape in self.shapes.items() if len(shape) == 2}
        # Experts and routers are no linear layers in transformers' code, which an adapter's words mean.
        found = {name for name in found if name in adapted or not (is_expert(name) or is_router(name))}
        for stored, module in self._own.items():
            if module in found:
                found.remove(module)
                found.add(stored)
        for fused, pieces in self._fused.items():
            if not adapted.isdisjoint(piece.module for piece in pieces):
                continue
            found -= {piece.module for piece in pieces}
            found.add(fused)
        return found
