"""The execution providers that llorch knows: one row each, which everything else asks.

What brings a provider, which options it takes, where its memory is, what it computes in, and which target's
graphs it runs. Where the facts come from, and which rows have been run, is in docs/providers.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from llorch_serve.artifact.manifest import ComputeType, Target
from llorch_serve.errors import ProviderError
from llorch_serve.providers.options import BYTES, FLAG, INDEX, LIST, TEXT, WHOLE, OptionType, choice

CPU: Final = "CPUExecutionProvider"


class Arithmetic(StrEnum):
    """How a provider computes in a type. WIDENED: it stores the type and computes in float32, between
    casts.
    """

    NATIVE = "native"
    WIDENED = "widened"


class Memory(StrEnum):
    """Where keys and values are kept.

    HOST: in the process, where one call advances many sequences.
    DEVICE: on the device, one buffer for each sequence, each of which takes a call of its own, unless buffers
    are ``divisible``.
    """

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One row.

    name, aliases: what ``--provider`` takes. runtime_name: onnxruntime's name for it.
    wheel, extra: the distribution that brings it, and llorch's extra for that.
    plugin: the module of a plugin wheel, which onnxruntime loads at run time; None: it is built into
        ``wheel``.
    systems: values of ``sys.platform`` that the wheel is built for.
    libraries: shared libraries of others that it needs, and whose they are.
    options: what ``--provider-option`` takes. targets: whose graphs it runs, its own first.
    arithmetic: what it computes in; a type that is absent it has no kernels for.
    threads: the option that limits its threads, where that of the session does not. device: what it runs on,
        for people.
    label: what such a device is called for machines, before its number; empty: as the provider. device_type:
        onnxruntime's name of its memory, where that is a device's.
    device_memory: where such a device's memory is, as a pool manager is told: its own, or the host's too.
    in_place: its kernels read host memory where it lies; else onnxruntime copies what is bound.
    divisible: addresses within a buffer on its device can be computed, so that one call advances many
        sequences there too.
    """

    name: str
    runtime_name: str
    wheel: str
    aliases: tuple[str, ...] = ()
    extra: str
    plugin: str | None = None
    systems: tuple[str, ...] = ("linux", "win32", "darwin")
    libraries: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, OptionType] = field(default_factory=dict)
    targets: tuple[Target, ...]
    arithmetic: Mapping[ComputeType, Arithmetic]
    device: str
    label: str = ""
    threads: str | None = None
    memory: Memory = Memory.HOST
    device_type: str = "cpu"
    device_memory: Literal["discrete", "unified", "unknown"] = "unknown"
    in_place: bool = False
    divisible: bool = False

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'llorch[{self.extra}]'"


def _native(*types: ComputeType) -> dict[ComputeType, Arithmetic]:
    return dict.fromkeys(types, Arithmetic.NATIVE)


CUDA_GRAPHS: Final = "enable_cuda_graph"
"""The option by which CUDA's provider records the kernels of a call once and replays them."""

_CUDA_DRIVER: Final = {"libcuda.so.1": "of NVIDIA's driver"}

PROVIDERS: Final[tuple[Provider, ...]] = (
    Provider(
        name="cpu",
        runtime_name=CPU,
        wheel="onnxruntime",
        extra="cpu",
        options={"use_arena": FLAG},
        targets=("cpu", "portable", "cuda", "coreml", "directml", "openvino", "webgpu"),
        arithmetic={"float32": Arithmetic.NATIVE, "float16": Arithmetic.WIDENED},
        device="the CPU",
        in_place=True,
    ),
    Provider(
        name="cuda",
        runtime_name="CUDAExecutionProvider",
        aliases=("gpu", "nvidia"),
        wheel="onnxruntime-gpu",
        extra="cuda",
        systems=("linux", "win32"),
        libraries=_CUDA_DRIVER,
        options={
            "device_id": INDEX,
            "gpu_mem_limit": BYTES,
            "arena_extend_strategy": choice("kNextPowerOfTwo", "kSameAsRequested"),
            "do_copy_in_default_stream": FLAG,
            "use_tf32": FLAG,
            "enable_skip_layer_norm_strict_mode": FLAG,
            "use_ep_level_unified_stream": FLAG,
            CUDA_GRAPHS: FLAG,
            "tunable_op_enable": FLAG,
            "tunable_op_tuning_enable": FLAG,
            "tunable_op_max_tuning_duration_ms": WHOLE,
        },
        targets=("cuda",),
        # Its GroupQueryAttention has no float32.
        arithmetic=_native("float16", "bfloat16"),
        device="NVIDIA GPUs",
        memory=Memory.DEVICE,
        device_type="cuda",
        device_memory="discrete",
        divisible=True,
    ),
    Provider(
        name="coreml",
        runtime_name="CoreMLExecutionProvider",
        aliases=("ane", "apple"),
        wheel="onnxruntime",
        extra="cpu",
        systems=("darwin",),
        options={
            "MLComputeUnits": choice("ALL", "CPUAndNeuralEngine", "CPUAndGPU", "CPUOnly"),
            "ModelFormat": choice("MLProgram", "NeuralNetwork"),
            "RequireStaticInputShapes": FLAG,
            "EnableOnSubgraphs": FLAG,
            "SpecializationStrategy": choice("Default", "FastPrediction"),
            "ProfileComputePlan": FLAG,
            "AllowLowPrecisionAccumulationOnGPU": FLAG,
            "ModelCacheDirectory": TEXT,
        },
        targets=("coreml",),
        arithmetic=_native("float32", "float16"),
        device="Apple's CPU, GPU and Neural Engine",
        device_memory="unified",
    ),
    Provider(
        name="directml",
        runtime_name="DmlExecutionProvider",
        aliases=("dml",),
        wheel="onnxruntime-directml",
        extra="directml",
        systems=("win32",),
        options={
            "device_id": INDEX,
            "performance_preference": choice("default", "high_performance", "minimum_power"),
            "device_filter": choice("gpu", "npu", "any"),
            "disable_metacommands": choice("true", "false"),
        },
        targets=("directml",),
        arithmetic=_native("float32", "float16"),
        device="DirectX 12 GPUs",
        label="gpu",
        device_memory="discrete",
    ),
    Provider(
        name="openvino",
        runtime_name="OpenVINOExecutionProvider",
        aliases=("ov", "intel"),
        wheel="onnxruntime-openvino",
        extra="openvino",
        systems=("linux", "win32"),
        options={
            "device_type": TEXT,
            "precision": choice("FP32", "FP16", "ACCURACY"),
            "num_of_threads": WHOLE,
            "num_streams": WHOLE,
            "cache_dir": TEXT,
            "load_config": TEXT,
            "model_priority": choice("DEFAULT", "LOW", "MEDIUM", "HIGH"),
            "enable_opencl_throttling": choice("true", "false"),
            "enable_qdq_optimizer": choice("true", "false"),
            "disable_dynamic_shapes": choice("true", "false"),
        },
        targets=("openvino",),
        arithmetic=_native("float32", "float16"),
        device="CPUs, and Intel's GPUs and NPUs",
        label="cpu",
        threads="num_of_threads",
        in_place=True,
    ),
    Provider(
        name="webgpu",
        runtime_name="WebGpuExecutionProvider",
        wheel="onnxruntime-ep-webgpu",
        extra="webgpu",
        plugin="onnxruntime_ep_webgpu",
        libraries={"libvulkan.so.1": "of a Vulkan loader"},
        options={
            "deviceId": INDEX,
            "dawnBackendType": choice("Vulkan", "D3D12"),
            "powerPreference": choice("high-performance", "low-power"),
            "validationMode": choice("disabled", "wgpuOnly", "basic", "full"),
            "forceCpuNodeNames": LIST,
            "storageBufferCacheMode": choice("disabled", "lazyRelease", "simple", "bucket"),
            "maxStorageBufferBindingSize": BYTES,
            "preserveDevice": FLAG,
        },
        targets=("webgpu",),
        arithmetic=_native("float32", "float16"),
        device="GPUs through Vulkan, Direct3D 12 or Metal",
        memory=Memory.DEVICE,
        device_type="webgpu",
    ),
    Provider(
        name="tensorrt",
        runtime_name="NvTensorRTRTXExecutionProvider",
        aliases=("trt", "nv-tensorrt-rtx", "tensorrt-rtx"),
        wheel="onnxruntime-ep-nv-tensorrt-rtx",
        extra="tensorrt",
        plugin="onnxruntime_ep_nv_tensorrt_rtx",
        systems=("linux", "win32"),
        libraries=_CUDA_DRIVER,
        options={
            "device_id": INDEX,
            "nv_max_workspace_size": BYTES,
            "nv_max_shared_mem_size": BYTES,
            "nv_runtime_cache_path": TEXT,
        },
        targets=("cuda",),
        arithmetic=_native("float32", "float16"),
        device="NVIDIA RTX GPUs",
        label="cuda",
        memory=Memory.DEVICE,
        device_type="cuda",
    ),
    Provider(
        name="mlx",
        runtime_name="MLXExecutionProvider",
        aliases=("metal",),
        wheel="onnxruntime-ep-mlx",
        extra="mlx",
        plugin="onnxruntime_ep_mlx",
        systems=("darwin",),
        targets=("webgpu",),
        arithmetic=_native("float32", "float16"),
        device="Apple's GPUs",
    ),
)

_BY_NAME: Final = {name: row for row in PROVIDERS for name in (row.name, row.runtime_name, *row.aliases)}

RUNS: Final[Mapping[str, tuple[Target, ...]]] = {row.runtime_name: row.targets for row in PROVIDERS}
"""Targets whose graphs a provider is given. The CPU's has kernels for all."""

ARITHMETIC: Final[Mapping[str, Mapping[ComputeType, Arithmetic]]] = {
    row.runtime_name: row.arithmetic for row in PROVIDERS
}
"""What providers compute the decoder's operators in; a type that is absent they have no kernels for."""


def find_provider(name: str) -> Provider:
    """Return the row that a name, an alias or onnxruntime's own name stands for, in any case of letters.

    Raises ProviderError with the nearest name.
    """
    lowered = {known.lower(): row for known, row in _BY_NAME.items()}
    if (row := lowered.get(name.lower())) is not None:
        return row
    raise ProviderError(
        f"--provider is {name!r}, which is no provider; {nearest(name, list(lowered), names())}. "
        "A plugin of another provider goes with --ep-library PATH"
    )


def names() -> list[str]:
    """Return the names that ``--provider`` takes, without aliases."""
    return [row.name for row in PROVIDERS]


def nearest(found: str, candidates: Sequence[str], listed: Sequence[str]) -> str:
    """Return the candidate that is most like a misspelt word, as a question, and what there is."""
    close = difflib.get_close_matches(found.lower(), candidates, n=1, cutoff=0.5)
    everything = f"expected {', '.join(listed)}" if listed else "it takes none"
    return f"did you mean {close[0]}? {everything}" if close else everything
