"""A model's tokenizer and its graph are made beside each other, and errors come as if they had not been."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from llorch_serve.loading.beside import made_beside
from llorch_serve.loading.collection import uncollected
from llorch_serve.python_child import child_environment


def failing(error: Exception) -> object:
    raise error


def kept(_: object) -> None:
    pytest.fail("nothing is let go of here")


def test_both_are_made_at_once() -> None:
    met = threading.Barrier(2, timeout=20)

    def make(name: str) -> str:
        met.wait()
        return name

    assert made_beside(lambda: make("tokenizer"), lambda: make("graph"), kept) == ("tokenizer", "graph")


def test_the_first_ones_error_is_told_and_what_the_second_made_is_let_go_of() -> None:
    let_go: list[str] = []
    with pytest.raises(ValueError, match="tokenizer"):
        made_beside(lambda: failing(ValueError("tokenizer")), lambda: failing(KeyError("graph")), kept)
    with pytest.raises(ValueError, match="tokenizer"):
        made_beside(lambda: failing(ValueError("tokenizer")), lambda: "graph", let_go.append)
    assert let_go == ["graph"]
    with pytest.raises(KeyError, match="graph"):
        made_beside(lambda: 1, lambda: failing(KeyError("graph")), kept)


def test_the_collector_is_as_it_was_after_a_load() -> None:
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        with pytest.raises(ValueError, match="load"), uncollected():
            failing(ValueError("load"))
        assert gc.isenabled()
        gc.disable()
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_model_that_is_let_go_of_is_collected() -> None:
    class Model:
        def __init__(self) -> None:
            self.itself = self

    with uncollected():
        model = Model()
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_what_a_load_does_not_need_is_not_imported() -> None:
    """Each of these takes tens of milliseconds of every command's start."""
    code = (
        "import sys, llorch_serve.loading.worker;"
        "print(*sorted({'asyncio', 'grpc', 'google.protobuf', 'jinja2', 'onnxruntime', 'ssl', 'tokenizers'}"
        "& set(sys.modules)))"
    )
    command = [sys.executable, "-P", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=child_environment())
    assert found.stdout.split() == []
