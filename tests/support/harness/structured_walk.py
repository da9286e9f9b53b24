"""Compiling and walking grammars without a model: shared by the tests of structured output."""

from __future__ import annotations

import queue
import random

import numpy as np

from llorch_serve.structured.compiler import GrammarCompiler
from llorch_serve.structured.constraint import Constraint, Program
from llorch_serve.structured.spec import Structured

PATIENCE_S = 60.0


def compiled(compiler: GrammarCompiler, form: Structured) -> Program | Exception:
    """Return what the compiler makes of a form, waiting for it if need be."""
    found: queue.SimpleQueue[Program | Exception] = queue.SimpleQueue()
    at_once = compiler.begin(form, ticket=object(), done=found.put)
    return found.get(timeout=PATIENCE_S) if at_once is None else at_once


def constrained(
    compiler: GrammarCompiler, form: Structured, stop_ids: frozenset[int] = frozenset()
) -> Constraint:
    found = compiled(compiler, form)
    assert isinstance(found, Program), found
    return found.begin(stop_ids)


def allowed(constraint: Constraint) -> list[int]:
    return np.flatnonzero(~constraint.forbidden()).tolist()


def walk(
    constraint: Constraint, *, seed: int, stop_ids: frozenset[int] = frozenset(), most: int = 400
) -> list[int]:
    """Choose tokens at random until the answer ends; return them, without the stop token."""
    draw = random.Random(seed)
    ids: list[int] = []
    while not constraint.ended and len(ids) < most:
        token = draw.choice(allowed(constraint))
        if token in stop_ids:
            break
        ids.append(token)
        constraint.advance(token)
    return ids
