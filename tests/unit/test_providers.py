"""Which runtime is installed, and is it the one asked for: every answer but yes names the pip line to run."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from types import ModuleType

import pytest

from llorch_serve.errors import ProviderError
from llorch_serve.providers import import_runtime, usable_cpus


def install(monkeypatch: pytest.MonkeyPatch, version: str | None, *distributions: str) -> None:
    """Pretend that these distributions, and a module of this version, are all that is installed."""

    def look_up(name: str) -> str:
        if name in distributions:
            return version or "0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", look_up)
    module = None
    if version is not None:
        module = ModuleType("onnxruntime")
        module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime", module)


def test_the_installed_runtime_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "1.27.1", "onnxruntime-gpu")
    assert import_runtime("1.24") is sys.modules["onnxruntime"]


def test_no_runtime_names_the_line_that_installs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(ProviderError, match=r"pip install 'llorch\[cpu\]'") as caught:
        import_runtime("1.24")
    assert "\n" not in str(caught.value)


def test_two_distributions_of_one_module_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "1.27.1", "onnxruntime", "onnxruntime-gpu")
    with pytest.raises(ProviderError, match="onnxruntime and onnxruntime-gpu are both installed") as caught:
        import_runtime("1.24")
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in str(caught.value)


@pytest.mark.parametrize(
    ("installed", "minimum", "enough"),
    [
        ("1.24.0", "1.24", True),
        ("1.24.4", "1.24", True),
        ("1.23.9", "1.24", False),
        ("1.9.0", "1.24", False),  # smaller as a number, larger as text
        ("1.100.0", "1.24", True),
        ("2.0.0", "1.24", True),
        ("1.25.0.dev20260101", "1.25", True),
    ],
)
def test_versions_are_compared_as_numbers(
    monkeypatch: pytest.MonkeyPatch, installed: str, minimum: str, enough: bool
) -> None:
    install(monkeypatch, installed, "onnxruntime")
    if enough:
        assert import_runtime(minimum).__version__ == installed
        return
    with pytest.raises(ProviderError, match=f"pip install -U 'onnxruntime>={minimum}'") as caught:
        import_runtime(minimum)
    assert installed in str(caught.value)


def test_too_old_names_the_distribution_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "1.20.0", "onnxruntime-openvino")
    with pytest.raises(ProviderError, match=r"pip install -U 'onnxruntime-openvino>=1\.24'"):
        import_runtime("1.24")


def test_the_cpus_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5, 9}, raising=False)
    assert usable_cpus() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cpus() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus() == 1
