"""For somebody who waits, the graph that decodes is loaded when it is first run, and errors come as if it had
been there.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from llorch_serve.errors import ArtifactError, ProviderError
from llorch_serve.providers import CPU
from llorch_serve.python_child import child_environment
from llorch_serve.runtime.binding import load_graphs
from llorch_serve.runtime.graph_choice import GraphChoice, GraphFile
from llorch_serve.runtime.graph_loading import attention_kernel
from llorch_serve.runtime.late_graph import LateGraph
from support.builders.tiny_artifact import tiny_manifest

MANIFEST = tiny_manifest()
DECODE = GraphFile("decode", MANIFEST.recipe)
ONE = GraphChoice(MANIFEST.kv, DECODE, None, None)
TWO = GraphChoice(MANIFEST.kv, DECODE, GraphFile("prompts", MANIFEST.recipe), None)
ARTIFACT = mock.Mock(manifest=MANIFEST, folder=Path("a"))


@dataclass
class Loader:
    """Stands for a binder. provider: what it loads on.

    meeting: where a graph that is looked at and the one for prompts wait for each other. broken: graphs that
    do not load. seen: loads, in the order of their beginnings.
    """

    provider: Any = field(default_factory=lambda: mock.Mock(runtime_name=CPU))
    meeting: threading.Barrier | None = None
    broken: tuple[str, ...] = ()
    seen: list[str] = field(default_factory=list)
    artifact: Any = ARTIFACT
    folder: Path = Path("a")
    cut: None = None

    def load(self, path: Path, *_: object, plain_attention: bool, packed: bool = True) -> tuple[Any, Any]:
        name = path.name if packed else f"{path.name} unpacked"
        self.seen.append(name)
        if self.meeting is not None and name != "decode":
            self.meeting.wait()
        if name in self.broken:
            raise ArtifactError(name)
        return f"where {name}", name


def load(loader: Loader, graphs: GraphChoice = TWO, *, prompts_first: bool = True) -> Any:
    return load_graphs(  # type: ignore[arg-type]
        loader, graphs, context=64, slots=2, prompts_first=prompts_first
    )


def test_prompts_are_there_and_the_graph_that_decodes_is_looked_at_beside_them() -> None:
    loader = Loader(meeting=threading.Barrier(2, timeout=20))
    found = load(loader)
    assert (found.where, found.prompts, found.decode) == ("where decode unpacked", "prompts", None)
    assert sorted(loader.seen) == ["decode unpacked", "prompts"]
    assert found.load_decode() == "decode"


@pytest.mark.parametrize(
    ("loader", "graphs", "options", "order"),
    [
        (Loader(), TWO, {"prompts_first": False}, ["decode", "prompts"]),
        (Loader(provider=mock.Mock(runtime_name="Other")), TWO, {}, ["decode", "prompts"]),
        (Loader(), ONE, {}, ["decode"]),
    ],
    ids=["not asked", "another provider", "one graph"],
)
def test_else_all_is_there(
    loader: Loader, graphs: GraphChoice, options: dict[str, Any], order: list[str]
) -> None:
    found = load(loader, graphs, **options)
    assert (found.decode, found.load_decode) == ("decode", None)
    assert loader.seen == order


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (("decode unpacked", "prompts"), "decode unpacked"),
        (("decode unpacked",), "decode unpacked"),
        (("prompts",), "prompts"),
    ],
)
def test_what_is_broken_is_told_at_once_that_of_the_graph_that_decodes_first(
    broken: tuple[str, ...], told: str
) -> None:
    loader = Loader(broken=broken, meeting=threading.Barrier(2, timeout=20))
    with pytest.raises(ArtifactError, match=told):
        load(loader)
    assert "decode" not in loader.seen


PLAIN = "ORT_GQA_DISABLE_FLASH_ATTENTION"


@pytest.mark.parametrize("before", [None, "0"])
def test_the_choice_of_a_kernel_ends_with_the_last_session_of_it(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(PLAIN, raising=False)
    if before is not None:
        monkeypatch.setenv(PLAIN, before)
    with ExitStack() as second:
        with attention_kernel(plain=True):
            with attention_kernel(plain=None):  # one that is only looked at waits for none
                second.enter_context(attention_kernel(plain=True))
            assert os.environ[PLAIN] == "1"
        assert os.environ[PLAIN] == "1"
        assert child_environment().get(PLAIN) == before
    assert os.environ.get(PLAIN) == before


@pytest.mark.parametrize("plain", [False, True])
def test_sessions_of_two_kernels_are_not_made_at_once(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    monkeypatch.delenv(PLAIN, raising=False)
    begun, seen = threading.Event(), []

    def make_other() -> None:
        begun.set()
        with attention_kernel(plain=not plain):
            seen.append(os.environ.get(PLAIN))

    other = threading.Thread(target=make_other, daemon=True)
    with attention_kernel(plain=plain):
        other.start()
        assert begun.wait(20)
        other.join(0.05)  # it may not go on, however long it is given
        assert seen == []
        assert os.environ.get(PLAIN) == ("1" if plain else None)
    other.join(20)
    assert seen == [None if plain else "1"]


class Bound:
    """A graph that returns what it is asked."""

    def __init__(self, session: object) -> None:
        self.session = session

    def run(self, *asked: object) -> Any:
        return self.session, asked


def test_the_first_call_loads_the_graph_and_binds_it_once() -> None:
    done: list[str] = []
    late = LateGraph(
        lambda: done.append("loaded") or "session", lambda got: done.append("bound") or Bound(got)
    )
    assert done == []
    for step in range(2):
        assert late.run(0, [step], [1], [0]) == ("session", (0, [step], [1], [0]))
    assert done == ["loaded", "bound"]


def failing(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ArtifactError("decode.onnx cannot be loaded"), ProviderError),  # which ends the call's answers alone
        (MemoryError("decode.onnx cannot be loaded"), MemoryError),
    ],
)
def test_a_graph_that_cannot_be_loaded_after_all_fails_the_call_by_its_name(
    error: Exception, told: type[Exception]
) -> None:
    with pytest.raises(told, match=r"^decode.onnx cannot be loaded$"):
        LateGraph(lambda: failing(error), lambda _: pytest.fail("nothing to bind")).run(0, [1], [1], [0])
