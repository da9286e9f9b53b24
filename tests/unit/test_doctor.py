"""What ``llorch doctor`` finds: the machine, wheels that overwrite each other, and operators that compute
wrongly.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from llorch_serve.doctor.examine import examine
from llorch_serve.doctor.machine import look_at_machine
from llorch_serve.errors import ProviderError
from llorch_serve.providers import (
    CPU,
    PROVIDERS,
    ActiveProvider,
    Arithmetic,
    ProviderChoice,
    activate,
    import_runtime,
)
from llorch_serve.providers.nvidia import Gpu
from llorch_serve.runtime import operator_check as self_test
from llorch_serve.runtime import operator_graphs
from llorch_serve.runtime.operator_graphs import OperatorCase, cases
from llorch_serve.terminal.doctor import _text


@pytest.mark.parametrize("target", sorted(operator_graphs._OF_TARGET))
def test_the_graphs_are_onnx(target: str) -> None:
    found = cases(target)
    assert len(found) == len(operator_graphs._OF_TARGET[target]) > 0
    for case in found:
        model = onnx.load_from_string(case.model)
        onnx.checker.check_model(model)
        assert [value.name for value in model.graph.input] == list(case.feeds)
        assert np.isfinite(case.expected).all(), case.name
        declared = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
        assert declared == list(case.expected.shape), case.name


def test_every_target_of_a_provider_has_operators_or_none_of_its_own() -> None:
    assert {row.targets[0] for row in PROVIDERS} - operator_graphs._OF_TARGET.keys() <= {"coreml", "portable"}
    assert cases("coreml") == []


def test_the_runtime_here_computes_them_all() -> None:
    found = examine(ProviderChoice(), None)
    assert found.problems == ()
    assert found.used == CPU
    assert len(found.operators) == len(cases("cpu")) >= 7
    assert all(result.passed and result.provider == CPU for result in found.operators)
    assert [state.name for state in found.providers if state.available] == ["cpu"]


def changed(case: OperatorCase) -> OperatorCase:
    expected = case.expected.copy()
    expected.reshape(-1)[3] += 0.1 * np.abs(expected).max()
    return replace(case, expected=expected)


def test_an_operator_that_is_off_is_a_problem_of_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "cases", lambda *asked: [changed(case) for case in cases(*asked)])
    found = examine(ProviderChoice(), None)
    assert not any(result.passed for result in found.operators)
    assert {problem.exit_code for problem in found.problems} == {4}
    assert found.problems[0].message.startswith(f"GroupQueryAttention on {CPU} is off by 0.")


def wrong_beyond(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Have attention go wrong for calls with more rows, as a faulty kernel would."""

    def attention(
        tokens: int = operator_graphs.WIDE,
        start: int = 0,
        element: operator_graphs.AttentionType = "float32",
    ) -> OperatorCase:
        case = operator_graphs.attention(tokens, start, element)
        return changed(case) if tokens > rows else case

    monkeypatch.setattr(self_test, "attention", attention)
    monkeypatch.setattr(self_test, "cases", lambda _target, _element: [attention()])


def runtime_and_cpu() -> tuple[Any, ActiveProvider]:
    runtime = import_runtime("1.24")
    return runtime, activate(ProviderChoice(), runtime)


@pytest.mark.parametrize(("rows", "found"), [(100, None), (30, 4), (4, 4), (3, 2), (1, 1)])
def test_attention_is_tried_with_fewer_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int, found: int | None
) -> None:
    wrong_beyond(monkeypatch, rows)
    assert self_test.attention_rows(*runtime_and_cpu(), 1) == found
    (result,) = self_test.run_operators(*runtime_and_cpu(), 1)
    assert result.passed
    assert result.reason == (None if found is None else self_test.too_many_rows(found))


def test_attention_that_is_wrong_for_a_single_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_beyond(monkeypatch, 0)
    with pytest.raises(ProviderError, match=r"computes GroupQueryAttention wrongly here: it is off by 0\."):
        self_test.attention_rows(*runtime_and_cpu(), 1)
    assert [problem.exit_code for problem in examine(ProviderChoice(), None).problems] == [4]


@pytest.mark.parametrize(("tokens", "start"), [(40, 0), (4, 36), (1, 39), (7, 20)])
def test_attention_after_a_past_is_what_the_runtime_computes(tokens: int, start: int) -> None:
    assert self_test._run(*runtime_and_cpu(), 1, operator_graphs.attention(tokens, start)).passed


@pytest.mark.parametrize("element", ["float32", "float16"])
def test_attention_is_tried_in_a_type_that_the_provider_attends_in(
    monkeypatch: pytest.MonkeyPatch, element: operator_graphs.AttentionType
) -> None:
    tried = []
    real = operator_graphs.attention

    def attention(*given: Any, **named: Any) -> OperatorCase:
        case = real(*given, **named)
        tried.append(str(case.feeds["query"].dtype))
        return case

    monkeypatch.setattr(operator_graphs, "attention", attention)
    monkeypatch.setattr(self_test, "attention", attention)
    runtime, cpu = runtime_and_cpu()
    assert cpu.row is not None
    row = replace(cpu.row, arithmetic={element: Arithmetic.NATIVE})
    assert self_test.attention_rows(runtime, replace(cpu, row=row), 1) is None
    assert all(result.passed for result in self_test.run_operators(runtime, replace(cpu, row=row), 1))
    assert tried == [element, element]


def test_an_operator_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [replace(case, model=case.model.replace(b"QuickGelu", b"SlowGelux")) for case in cases("cpu")]
    monkeypatch.setattr(self_test, "cases", lambda *_asked: broken)
    found = examine(ProviderChoice(), None)
    (result,) = [result for result in found.operators if not result.passed]
    assert (result.name, result.error) == ("QuickGelu", None)
    assert "SlowGelux" in str(result.reason)
    assert "QuickGelu on CPUExecutionProvider fails" in found.problems[0].message


def test_two_wheels_of_one_module_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        return "1.27.1" if name == "onnxruntime-gpu" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = examine(ProviderChoice(), None)
    assert len(found.runtimes) == 2
    assert [problem.exit_code for problem in found.problems] == [4]
    assert "are both installed and overwrite each other" in found.problems[0].message


def test_features_are_read_where_the_system_lists_them(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor : 0\nmodel name\t: Fast CPU\nflags\t\t: fpu avx2 avx512_vnni\n\nprocessor : 1\n"
    )
    machine = look_at_machine(info)
    assert (machine.cpu, machine.cpu_features) == ("Fast CPU", ("avx2", "avx512_vnni"))
    assert look_at_machine(tmp_path / "none").cpu_features == ()
    assert 1 <= machine.cpus_allowed <= machine.cpus
    assert 0 < machine.memory_free_bytes <= machine.memory_bytes


def test_gpus_are_told_with_memory_and_driver() -> None:
    gpus = (
        Gpu(0, "NVIDIA H200", "570.86", 2**30 * 140, 2**30 * 139),
        Gpu(1, "NVIDIA GB10", "570.86", None, None),
    )
    found = examine(ProviderChoice(), None)
    text = _text(replace(found, machine=replace(found.machine, gpus=gpus)))
    assert "GPU 0      NVIDIA H200; 139.0 of 140.0 GiB free; driver 570.86\n" in text
    assert "GPU 1      NVIDIA GB10; memory not told; driver 570.86\n" in text
