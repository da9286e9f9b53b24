"""The table of providers: every row is whole, every one that is absent says what brings it, every slip is
named.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from llorch_export.formats.targets import TARGETS
from llorch_serve.errors import ProviderError, UsageError
from llorch_serve.providers import (
    CPU,
    PROVIDERS,
    ActiveProvider,
    Memory,
    Provider,
    ProviderChoice,
    activate,
    check_target,
)
from llorch_serve.providers.table import find_provider, names
from support.fakes.runtime import FakeRuntime

OTHERS = [row for row in PROVIDERS if row.name != "cpu"]


def only(*distributions: str):
    def look_up(name: str) -> str:
        if name in distributions:
            return "1.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    return look_up


@pytest.fixture
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """A machine with the CPU's wheel alone, and no library of any driver."""
    monkeypatch.setattr(importlib.metadata, "version", only("onnxruntime"))

    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    for row in PROVIDERS:
        if row.plugin is not None:
            monkeypatch.setitem(sys.modules, row.plugin, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return FakeRuntime()


@pytest.mark.parametrize("row", PROVIDERS, ids=names())
def test_every_name_of_a_row_finds_it(row: Provider) -> None:
    for name in (row.name, row.runtime_name, *row.aliases):
        assert find_provider(name) is row
        assert find_provider(name.upper()) is row


def test_no_name_stands_for_two_rows() -> None:
    every = [name.lower() for row in PROVIDERS for name in (row.name, row.runtime_name, *row.aliases)]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("row", PROVIDERS, ids=names())
def test_a_row_and_the_exporters_table_agree(row: Provider) -> None:
    own = TARGETS[row.targets[0]]
    if row.plugin is None:
        assert own.provider in (row.runtime_name, None)  # None: a target of any provider
    for target in row.targets:
        if row.name != "cpu":
            assert set(TARGETS[target].compute_types) & set(row.arithmetic), target
    assert (row.memory is Memory.DEVICE) == (row.device_type != "cpu")


@pytest.mark.parametrize("row", OTHERS, ids=[row.name for row in OTHERS])
def test_an_absent_provider_names_its_wheel_its_libraries_and_what_there_is(
    plain_machine: FakeRuntime, row: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", row.systems[0])
    with pytest.raises(ProviderError) as caught:
        activate(ProviderChoice(row.name), plain_machine)
    message = str(caught.value)
    assert "\n" not in message
    assert row.wheel in message
    assert message.endswith(f"available here: {CPU}")
    assert row.install in message or row.wheel == "onnxruntime"
    if row.systems[0] != "darwin" and row.name != "directml":
        for library in row.libraries:
            assert f"{library} {row.libraries[library]}" in message


def test_a_wheel_of_another_system_is_not_recommended(plain_machine: FakeRuntime) -> None:
    for name in ("coreml", "directml", "mlx"):
        with pytest.raises(ProviderError, match=f"and this is {sys.platform}") as caught:
            activate(ProviderChoice(name), plain_machine)
        assert "pip install" not in str(caught.value)


def test_another_runtime_wheel_is_to_go_first(plain_machine: FakeRuntime) -> None:
    with pytest.raises(ProviderError, match=r"pip uninstall -y onnxruntime && pip install 'llorch\[cuda\]'"):
        activate(ProviderChoice("cuda"), plain_machine)


def test_a_wheel_without_a_driver_names_the_libraries_of_its_cuda(
    plain_machine: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", only("onnxruntime-gpu"))
    runtime = FakeRuntime(("CUDAExecutionProvider", CPU), cuda_version="13.0")
    with pytest.raises(ProviderError) as caught:
        activate(ProviderChoice("cuda"), runtime)
    message = str(caught.value)
    assert "libcuda.so.1 of NVIDIA's driver, libcudart.so.13 of CUDA 13, libcublasLt.so.13" in message
    assert "libcudnn.so.9 of cuDNN 9" in message


@pytest.mark.parametrize(
    ("found", "meant"),
    [
        ("cudda", "cuda"),
        ("open-vino", "openvino"),
        ("wbgpu", "webgpu"),
        ("CoreM", "coreml"),
        ("tensort", "tensorrt"),
    ],
)
def test_a_misspelt_provider_gets_the_nearest_name(found: str, meant: str) -> None:
    with pytest.raises(ProviderError, match=f"did you mean {meant}\\?"):
        activate(ProviderChoice(found), FakeRuntime())


def test_nonsense_gets_the_list() -> None:
    with pytest.raises(ProviderError, match="which is no provider; expected cpu, cuda, coreml,"):
        activate(ProviderChoice("qqqqqq"), FakeRuntime())


@pytest.mark.parametrize(
    ("provider", "option", "says"),
    [
        ("cuda", "gpu_memlimit=1", "did you mean gpu_mem_limit"),
        ("cuda", "GPU_MEM_LIMIT=1", "did you mean gpu_mem_limit"),
        ("cuda", "gpu_mem_limit=2GB", "takes a number of bytes there"),
        ("cuda", "gpu_mem_limit=0", "takes a number of bytes there"),
        ("cuda", "device_id=-1", "takes a device's number"),
        ("cuda", "device_id=²", "takes a device's number"),
        ("cuda", "arena_extend_strategy=knextpoweroftwo", "kNextPowerOfTwo or kSameAsRequested"),
        ("cuda", "enable_cuda_graphs=1", "did you mean enable_cuda_graph"),
        ("cuda", "enable_cuda_graph=yes", "takes 0 or 1 there"),
        ("openvino", "num_of_thread=2", "did you mean num_of_threads"),
        ("webgpu", "powerPreference=max", "high-performance or low-power"),
        ("coreml", "ModelFormat=onnx", "MLProgram or NeuralNetwork"),
        ("mlx", "anything=1", "it takes none"),
        ("cpu", "use_arena", "expected KEY=VALUE"),
        ("cpu", "=1", "expected KEY=VALUE"),
        ("cpu", "use_arena=yes", "takes 0 or 1 there"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_looked_for(provider: str, option: str, says: str) -> None:
    with pytest.raises(ProviderError, match=says):
        activate(ProviderChoice(provider, (option,)), FakeRuntime())


def test_an_option_twice_is_refused() -> None:
    with pytest.raises(ProviderError, match="use_arena is given twice"):
        activate(ProviderChoice("cpu", ("use_arena=0", "use_arena=1")), FakeRuntime())


def test_what_the_cpu_alone_cannot_leave_to_the_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="--allow-cpu-nodes has no effect on the cpu provider"):
        activate(ProviderChoice(allow_cpu_nodes=True), FakeRuntime())


def test_options_reach_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    runtime = FakeRuntime(("CUDAExecutionProvider", CPU))
    active = activate(ProviderChoice("gpu", ("device_id=1", "gpu_mem_limit=4096")), runtime)
    options = SimpleNamespace(intra_op_num_threads=3)
    assert active.add_to(options) == {
        "providers": [("CUDAExecutionProvider", {"device_id": "1", "gpu_mem_limit": "4096"})],
        "enable_fallback": False,
    }
    assert (active.memory, active.device_id) == (Memory.DEVICE, 1)
    assert (active.memory_limit(10**6), active.memory_limit(100)) == (4096, 100)


@pytest.mark.parametrize(
    ("name", "options", "device"),
    [
        ("cpu", {}, "cpu"),
        ("cuda", {}, "cuda:0"),
        ("cuda", {"device_id": "1"}, "cuda:1"),
        ("tensorrt", {"device_id": "2"}, "cuda:2"),
        ("directml", {"device_id": "1"}, "gpu:1"),
        ("webgpu", {"deviceId": "1"}, "webgpu:1"),
        ("openvino", {}, "cpu"),
        ("openvino", {"device_type": "GPU.1"}, "gpu.1"),
        ("coreml", {}, "coreml"),
    ],
)
def test_a_device_is_told_as_the_options_choose_it(name: str, options: dict[str, str], device: str) -> None:
    row = find_provider(name)
    assert ActiveProvider(row.runtime_name, row, options).device == device


def test_the_device_of_an_unknown_provider_is_called_after_it() -> None:
    assert ActiveProvider("FastExecutionProvider", None, {}).device == "fast"


def test_steps_are_recorded_by_the_one_that_can_unless_an_option_says_otherwise() -> None:
    for row in PROVIDERS:
        active = ActiveProvider(row.runtime_name, row, {})
        assert not active.captures, "nor is a call that is made once"
        assert active.with_captures().captures == (row.name == "cuda")
    row = find_provider("cuda")
    for value in ("0", "1"):
        active = ActiveProvider(row.runtime_name, row, {"enable_cuda_graph": value})
        assert active.with_captures() is active
        assert active.captures == (value == "1")
        assert "enable_cuda_graph" not in active.without_captures().options
    unknown = ActiveProvider("FastExecutionProvider", None, {})
    assert unknown.with_captures() is unknown


@pytest.mark.parametrize("row", [row for row in PROVIDERS if row.threads], ids=lambda row: row.name)
def test_a_provider_with_threads_of_its_own_gets_the_sessions_number(row: Provider) -> None:
    assert row.threads is not None
    runtime = FakeRuntime((row.runtime_name, CPU))
    options = SimpleNamespace(intra_op_num_threads=3)
    for given, threads in (((), "3"), ((f"{row.threads}=1",), "1")):
        active = activate(ProviderChoice(row.name, given), runtime)
        assert active.add_to(options)["providers"][0][1][row.threads] == threads


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libfast.so"
    path.write_bytes(b"")
    return path


def test_a_librarys_only_provider_needs_no_name(library: Path) -> None:
    runtime = FakeRuntime(offered={"libfast.so": ("FastExecutionProvider",)})
    active = activate(ProviderChoice(library=library, options=("whatever=1",)), runtime)
    assert (active.runtime_name, active.row, active.options) == (
        "FastExecutionProvider",
        None,
        {"whatever": "1"},
    )
    added: list[object] = []
    options = SimpleNamespace(add_provider_for_devices=lambda *given: added.append(given))
    assert active.add_to(options) == {"enable_fallback": False}
    assert added == [([active.devices[0]], {"whatever": "1"})]
    activate(ProviderChoice(library=library), runtime)
    assert runtime.registered == [str(library)], "a library is registered once a process"


def test_a_library_of_several_providers_needs_a_name_that_it_has(library: Path) -> None:
    runtime = FakeRuntime(offered={"libfast.so": ("FastExecutionProvider", "WebGpuExecutionProvider")})
    with pytest.raises(ProviderError, match=r"--provider is needed: .* offers FastExecutionProvider, WebGpu"):
        activate(ProviderChoice(library=library), runtime)
    with pytest.raises(ProviderError, match=r"--provider cuda: .* offers FastExecutionProvider, WebGpu"):
        activate(ProviderChoice("cuda", library=library), runtime)
    known = activate(ProviderChoice("webgpu", library=library), runtime)
    assert known.row is find_provider("webgpu")


def test_a_device_is_chosen_by_its_number(library: Path) -> None:
    runtime = FakeRuntime(offered={"libfast.so": ("WebGpuExecutionProvider",) * 2})
    active = activate(ProviderChoice("webgpu", ("deviceId=1",), library), runtime)
    assert active.devices[0].device.device_id == 1
    with pytest.raises(
        ProviderError, match="deviceId is 2 and WebGpuExecutionProvider has 2 devices here; choose 0 to 1"
    ):
        activate(ProviderChoice("webgpu", ("deviceId=2",), library), runtime)


def test_libraries_that_do_not_work_are_refused_by_path(library: Path) -> None:
    with pytest.raises(ProviderError, match=r"libnone\.so, which is no file"):
        activate(ProviderChoice(library=library.with_name("libnone.so")), FakeRuntime())
    with pytest.raises(ProviderError, match=r"libfast\.so cannot be loaded as a provider: bad ELF"):
        activate(ProviderChoice(library=library), FakeRuntime(refuses="bad\n  ELF"))
    with pytest.raises(ProviderError, match="offers no device on this machine; available here: CPUExec"):
        activate(ProviderChoice(library=library), FakeRuntime())


def test_a_plugin_wheel_is_found_by_its_module(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    wheel = ModuleType("onnxruntime_ep_webgpu")
    wheel.get_library_path = lambda: str(library)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, wheel.__name__, wheel)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: wheel if name == wheel.__name__ else None)
    runtime = FakeRuntime(offered={"libfast.so": ("WebGpuExecutionProvider",)})
    assert activate(ProviderChoice("webgpu"), runtime).devices
    with pytest.raises(ProviderError, match="not available for --provider webgpu"):
        activate(ProviderChoice("webgpu"), FakeRuntime())


def test_an_artifact_of_another_target_gets_the_export_line() -> None:
    with pytest.raises(ProviderError) as caught:
        check_target("cpu", "WebGpuExecutionProvider")
    message = str(caught.value)
    assert "llorch export SOURCE --output DIR --target webgpu" in message
    assert message.endswith("or run this artifact with --provider cpu")
    check_target("cpu", "FastExecutionProvider")
    for row in PROVIDERS:
        check_target(row.targets[0], row.runtime_name)
