"""Two graphs of an artifact are loaded beside each other for somebody who waits, and errors come as if they
had not been.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from llorch_serve.errors import ArtifactError
from llorch_serve.runtime.binding import LoadedGraphs, load_graphs
from llorch_serve.runtime.graph_choice import GraphChoice, GraphFile
from llorch_serve.runtime.graph_loading import attention_kernel
from support.builders.tiny_artifact import tiny_manifest

KERNEL = "ORT_GQA_DISABLE_FLASH_ATTENTION"
MANIFEST = tiny_manifest()
TWO = GraphChoice(
    MANIFEST.kv,
    GraphFile("decode", MANIFEST.recipe),
    GraphFile("prompts", MANIFEST.recipe),
    None,
)
LONG = 2**40  # tokens, with which prompts take another kernel than the plain one; so does what decodes here
SHORT = 64
ARTIFACT = mock.Mock(manifest=MANIFEST, folder=Path("a"))


@dataclass
class Loader:
    """Stands for a binder. meeting: where loads wait for each other; None: they do not.

    broken: graphs that do not load. seen: each graph that was loaded, with the kernel chosen then.
    """

    threads: int = 2
    meeting: threading.Barrier | None = None
    broken: tuple[str, ...] = ()
    seen: dict[str, str | None] = field(default_factory=dict)
    artifact: Any = ARTIFACT
    folder: Path = Path("a")
    cut: None = None

    def load(self, path: Path, *_: object, plain_attention: bool) -> tuple[Any, Any]:
        with attention_kernel(plain=plain_attention):
            if self.meeting is not None:
                self.meeting.wait()
            self.seen[path.name] = os.environ.get(KERNEL)
            if path.name in self.broken:
                raise ArtifactError(path.name)
        return f"where {path.name}", path.name


def loaded(loader: Loader, *, at_once: bool = True, context: int = LONG) -> LoadedGraphs:
    return load_graphs(loader, TWO, context=context, at_once=at_once)  # type: ignore[arg-type]  # it stands for one


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KERNEL, raising=False)


def test_both_are_loaded_at_once_where_they_are_asked_to() -> None:
    found = loaded(Loader(meeting=threading.Barrier(2, timeout=20)))
    assert (found.where, found.decode, found.prompts) == ("where decode", "decode", "prompts")


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        (Loader(), {"at_once": False}),
        (Loader(threads=1), {}),
        (Loader(), {"context": SHORT}),  # prompts take the plain kernel, and what decodes does not
    ],
    ids=["not asked", "one thread", "two kernels"],
)
def test_else_one_is_loaded_after_the_other(loader: Loader, options: dict[str, Any]) -> None:
    loader.meeting = threading.Barrier(2, timeout=0.01)  # whoever waits there is alone
    with pytest.raises(threading.BrokenBarrierError):
        loaded(loader, **options)
    assert loader.seen == {}
    loader.meeting = None
    assert loaded(loader, **options).prompts == "prompts"
    assert list(loader.seen) == ["decode", "prompts"]


def test_the_error_of_the_graph_that_decodes_comes_first() -> None:
    meeting = threading.Barrier(2, timeout=20)
    for broken, told in (
        (("decode", "prompts"), "decode"),
        (("decode",), "decode"),
        (("prompts",), "prompts"),
    ):
        with pytest.raises(ArtifactError, match=told):
            loaded(Loader(meeting=meeting, broken=broken))
        assert KERNEL not in os.environ


@pytest.mark.parametrize("at_once", [False, True])
def test_each_graph_has_its_kernel(at_once: bool) -> None:
    loader = Loader()
    loaded(loader, at_once=at_once, context=SHORT)
    assert loader.seen == {"decode": None, "prompts": "1"}
    assert KERNEL not in os.environ


class _Unwritable(dict[str, str]):
    def __setitem__(self, name: str, value: str) -> None:
        pytest.fail(f"{name} was set to {value}")

    def pop(self, name: str, *_: object) -> str:
        pytest.fail(f"{name} was removed")


def test_a_choice_inside_the_same_one_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as inside, attention_kernel(plain=True):
        inside.setattr(os, "environ", _Unwritable(os.environ))
        with attention_kernel(plain=True), attention_kernel(plain=False):
            assert os.environ[KERNEL] == "1"
        inside.undo()
    assert KERNEL not in os.environ
