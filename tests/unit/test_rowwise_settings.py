"""The setting that keeps products of bytes exact: asked for on CPUs that need it, by artifacts that multiply
bytes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest

from llorch_export.options import Rule
from llorch_serve.errors import ProviderError
from llorch_serve.providers import EXACT_BYTES, byte_settings, require_exact_bytes
from llorch_serve.runtime import graph_loading
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny

ASKED = dict([EXACT_BYTES])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu sse4_2 avx2 avx512f avx512_vnni\n" * 2, {}),
        ("model name\t: X\nflags\t\t: fpu avx2 avx_vnni\n", {}),
        ("flags\t\t: fpu sse4_2 avx2 fma\n", ASKED),
        ("flags\t\t: avx2 avx_vnni\nflags\t\t: avx2\n", ASKED),  # one core that needs it
        ("flags\t\t: avx2 avx_vnni_int16\n", ASKED),
        ("Features\t: fp asimd asimddp i8mm\n", ASKED),
        ("", ASKED),
    ],
)
def test_cpus_with_exact_kernels_of_their_own_do_without(
    tmp_path: Path, text: str, expected: dict[str, str]
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert byte_settings(tmp_path / "cpuinfo") == expected


def test_where_nothing_is_said_of_the_cpus_it_is_asked_for(tmp_path: Path) -> None:
    assert byte_settings(tmp_path / "none") == ASKED


def test_a_runtime_that_the_setting_would_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = export_tiny(
        write_hf_folder(tmp_path / "model"), tmp_path / "rows", precision="int8", activations="row"
    )
    monkeypatch.setattr(onnxruntime, "__version__", "1.29.1")
    monkeypatch.setattr(graph_loading, "byte_settings", lambda: ASKED)
    said = "onnxruntime 1.29.1 ends the process .* pip install -U 'onnxruntime>=1.30'"
    with pytest.raises(ProviderError, match=said):
        open_tiny(artifact)


@pytest.mark.parametrize(
    ("version", "refused"), [("1.24.4", False), ("1.25.0", True), ("1.29.1", True), ("1.30.0", False)]
)
def test_the_runtimes_that_end_are_known(version: str, refused: bool) -> None:
    told = pytest.raises(ProviderError) if refused else contextlib.nullcontext()
    with told:
        require_exact_bytes(SimpleNamespace(__version__=version))


def test_only_artifacts_that_multiply_bytes_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = write_hf_folder(tmp_path / "model"), []

    def settings() -> dict[str, str]:
        asked.append(True)
        return ASKED

    monkeypatch.setattr(graph_loading, "byte_settings", settings)
    open_tiny(export_tiny(source, tmp_path / "blocks", precision="int8"))
    # Of whose DequantizeLinear the setting would make what the runtime does not run.
    open_tiny(export_tiny(source, tmp_path / "portable", precision="int8", target="portable"))
    assert asked == []
    open_tiny(export_tiny(source, tmp_path / "rows", precision="int8", activations="row"))
    rule = Rule(("*.down_proj",), activations="row")
    open_tiny(export_tiny(source, tmp_path / "rule", precision="int8", rules=(rule,)))
    # One graph to measure the cache of each, and two here.
    assert len(asked) == 2 * (1 + 2)
