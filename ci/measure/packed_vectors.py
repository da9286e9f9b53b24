"""Write rows of ``tests/data/published/packed_vectors.jsonl``: what tools that pack weights store of small
matrices, and what they themselves read back.

usage: PYTHON -P ci/measure/packed_vectors.py >>tests/data/published/packed_vectors.jsonl

PYTHON is an interpreter that has torch and one of compressed-tensors, GPTQModel and auto-round.
"""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

ROWS, COLUMNS = 32, 64
_KINDS: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}
_INT: Final = {"type": "int", "symmetric": True}
_FLOAT: Final = {"type": "float", "symmetric": True}
COMPRESSED: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "w4a16": ("pack-quantized", {**_INT, "num_bits": 4, "strategy": "group", "group_size": 32}),
    "w4a16, affine": (
        "pack-quantized",
        {"type": "int", "symmetric": False, "num_bits": 4, "strategy": "group", "group_size": 32},
    ),
    "w3a16": ("pack-quantized", {**_INT, "num_bits": 3, "strategy": "channel"}),
    "w8a16, affine": (
        "pack-quantized",
        {"type": "int", "symmetric": False, "num_bits": 8, "strategy": "group", "group_size": 16},
    ),
    "w8a8": ("int-quantized", {**_INT, "num_bits": 8, "strategy": "channel"}),
    "w8a8, tensor": ("int-quantized", {**_INT, "num_bits": 8, "strategy": "tensor"}),
    "fp8": ("float-quantized", {**_FLOAT, "num_bits": 8, "strategy": "channel"}),
    "fp8, block": (
        "float-quantized",
        {**_FLOAT, "num_bits": 8, "strategy": "block", "block_structure": [16, 32]},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {**_FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "fp8"},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {**_FLOAT, "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "u8"},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {**_FLOAT, "num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "u8"},
    ),
}
GPTQ: Final[Mapping[str, dict[str, Any]]] = {
    "4 bits": {"bits": 4},
    "4 bits, version 2, affine": {"bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
    "4 bits, version 1, affine": {"bits": 4, "sym": False},
    "8 bits": {"bits": 8},
    "2 bits, order": {"bits": 2, "desc_act": True},
    "3 bits": {"bits": 3},
    "3 bits, version 2, affine": {"bits": 3, "sym": False, "checkpoint_format": "gptq_v2"},
}


def main() -> None:
    """Write the rows of whichever tool is there."""
    tools = {
        "gptqmodel": from_gptqmodel,
        "auto_round": from_auto_round,
        "compressed_tensors": from_compressed_tensors,
    }
    found = next(rows for module, rows in tools.items() if importlib.util.find_spec(module))
    for row in found():
        sys.stdout.write(json.dumps(row, separators=(",", ":")) + "\n")


def row(tool: str, label: str, settings: object, parts: Mapping[str, Any], weight: Any) -> dict[str, Any]:
    """Return a row. weight: as the tool unpacks it, in the type that it computes in."""
    return {
        "tool": f"{tool} {importlib.metadata.version(tool)}",
        "label": label,
        "settings": settings,
        "parts": {name: _stored(tensor) for name, tensor in parts.items()},
        "weight": _stored(weight),
    }


def _stored(tensor: Any) -> dict[str, Any]:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return {
        "kind": _KINDS[str(tensor.dtype).removeprefix("torch.")],
        "shape": list(tensor.shape),
        "data": base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode(),
    }


def from_compressed_tensors() -> Iterator[dict[str, Any]]:
    """Pack a matrix in each form with the tool's own compressors."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor  # type: ignore[import-not-found]
    from compressed_tensors.quantization import (  # type: ignore[import-not-found]
        QuantizationArgs,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import (  # type: ignore[import-not-found]
        calculate_qparams,
        generate_gparam,
    )

    torch.manual_seed(0)
    types = {"fp8": torch.float8_e4m3fn, "u8": torch.uint8}
    for label, (layout, chosen) in COMPRESSED.items():
        scale_type = types.get(chosen.get("scale_dtype", ""))
        args = QuantizationArgs(**{**chosen, "scale_dtype": scale_type, "zp_dtype": scale_type})
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
        weight = torch.randn(ROWS, COLUMNS) / 8
        low, high = _extremes(weight, chosen)
        state = {"weight": weight}
        whole = None
        if chosen["strategy"] == "tensor_group":
            whole = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
            state["weight_global_scale"] = whole
        scales, zeros = calculate_qparams(low, high, args, global_scale=whole)
        state |= {"weight_scale": scales} | ({} if chosen["symmetric"] else {"weight_zero_point": zeros})
        compressor = BaseCompressor.get_value_from_registry(layout)
        parts = compressor.compress(state, scheme)
        unpacked = compressor.decompress(dict(parts), scheme)["weight"]
        settings = {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        }
        yield row("compressed-tensors", label, settings, parts, unpacked)


def _extremes(weight: Any, chosen: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the smallest and largest weight of what shares a scale, in the shape that the tool wants."""
    strategy = chosen["strategy"]
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "block":
        rows, columns = chosen["block_structure"]
        blocks = weight.reshape(ROWS // rows, rows, COLUMNS // columns, columns)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.reshape(ROWS, -1, chosen["group_size"])
    return groups.amin(-1), groups.amax(-1)


def from_gptqmodel() -> Iterator[dict[str, Any]]:
    """Pack codes in each form with the tool's own layer, and unpack them with it."""
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # type: ignore[import-not-found]
    from gptqmodel.quantization.config import FORMAT  # type: ignore[import-not-found]
    from gptqmodel.utils import model as conversion  # type: ignore[import-not-found]

    generator = torch.Generator().manual_seed(0)
    group, to_1 = 32, conversion.convert_gptq_v2_to_v1_format_module
    for label, chosen in GPTQ.items():
        bits, symmetric, ordered = chosen["bits"], chosen.get("sym", True), chosen.get("desc_act", False)
        index = torch.arange(COLUMNS, dtype=torch.int32) // group
        index = index[torch.randperm(COLUMNS, generator=generator)] if ordered else index
        codes = torch.randint(0, 2**bits, (ROWS, COLUMNS), generator=generator)
        zeros = torch.randint(1, 2**bits, (ROWS, COLUMNS // group), generator=generator)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        scales = (torch.rand(ROWS, COLUMNS // group, generator=generator) + 0.5).to(torch.float16) / 16
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        spread = index.long()
        linear.weight.data = scales.float()[:, spread] * (codes - zeros[:, spread]).float()
        layer = TorchLinear(
            bits=bits,
            group_size=group,
            sym=symmetric,
            desc_act=ordered,
            in_features=COLUMNS,
            out_features=ROWS,
            format=FORMAT.GPTQ_V2,
        )
        layer.pack_original(linear, scales.float(), zeros.float(), index)
        weight = _unpacked(layer)
        layout = chosen.get("checkpoint_format", "gptq")
        if layout == "gptq":
            to_1(layer, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        settings = {"quant_method": "gptq", "group_size": group, "checkpoint_format": layout, **chosen}
        yield row("gptqmodel", label, settings, parts, weight)


def from_auto_round() -> Iterator[dict[str, Any]]:
    """Pack codes as AWQ does with the tool's own layer, and unpack them with it."""
    import torch
    from auto_round.export.export_to_awq import utils as awq  # type: ignore[import-not-found]

    generator = torch.Generator().manual_seed(0)
    for label, group in (("awq", 32), ("awq, one group", COLUMNS)):
        codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator)
        zeros = torch.randint(0, 16, (COLUMNS // group, ROWS), generator=generator).float()
        scales = ((torch.rand(COLUMNS // group, ROWS, generator=generator) + 0.5) / 16).half()
        spread = torch.arange(COLUMNS) // group
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data = scales.float()[spread].T * (codes - zeros[spread].T)
        layer = awq.WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.float(), zeros=zeros)
        parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
        weight = awq.dequantize_gemm(*parts.values(), 4, group).T
        settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
        yield row("auto-round", label, settings, parts, weight)


def _unpacked(layer: Any) -> Any:
    """Return the weight [out, in] of a layer of GPTQModel."""
    layer.post_init()
    return layer.dequantize_weight().T


if __name__ == "__main__":
    main()
