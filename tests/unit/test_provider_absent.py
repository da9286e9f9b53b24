"""What is said of a provider that is not here names what would bring it."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest

from llorch_serve.providers.choose import absent
from llorch_serve.providers.table import find_provider

RUNTIME = SimpleNamespace(get_available_providers=lambda: ["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("name", "installed", "found"),
    [
        ("cuda", ("onnxruntime",), "the wheel onnxruntime-gpu is not installed (onnxruntime 1.31.0 is); "),
        (
            "cuda",
            (),
            "the wheel onnxruntime-gpu is not installed (the onnxruntime here is of no known wheel); ",
        ),
        ("webgpu", ("onnxruntime",), "the wheel onnxruntime-ep-webgpu is not installed; install it: "),
        ("webgpu", (), "the wheel onnxruntime-ep-webgpu is not installed; install it: "),
    ],
)
def test_the_wheel_that_is_missing_and_the_one_in_its_place(
    monkeypatch: pytest.MonkeyPatch, name: str, installed: tuple[str, ...], found: str
) -> None:
    def version(distribution: str) -> str:
        if distribution in installed:
            return "1.31.0"
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(sys, "platform", "linux")
    assert found in str(absent(find_provider(name), RUNTIME))
