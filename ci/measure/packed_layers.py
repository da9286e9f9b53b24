"""Write rows of ``tests/data/published/packed_layers.jsonl``: of tools that pack the layers of a model.

usage: TORCHDYNAMO_DISABLE=1 PYTHONPATH=ci PYTHON -P -m measure.packed_layers >>FILE

PYTHON is an interpreter that has torch, transformers, and one of bitsandbytes, torchao, HQQ, ModelOpt and
Quark; ci/make-quantised sets them up.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from measure.packed_vectors import COLUMNS, ROWS, row

_MODULE: Final = "model.layers.0.mlp.down_proj"
Rows = Iterator[dict[str, Any]]


def main() -> None:
    """Write the rows of whichever tools are there."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # where tools write what they like
        found = [one for name, rows in _TOOLS.items() if importlib.util.find_spec(name) for one in rows()]
    for one in found:
        out.write(json.dumps(one, separators=(",", ":")) + "\n")


def _weight() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.randn(ROWS, COLUMNS) / 8


def from_bitsandbytes() -> Rows:
    """Pack a matrix with the functions that its layers call, and unpack it in float32."""
    import torch
    from bitsandbytes import functional  # type: ignore[import-not-found]

    weight = _weight()
    for table in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = functional.quantize_4bit(
                weight, blocksize=32, compress_statistics=nested, quant_type=table
            )
            parts = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
            unpacked = functional.dequantize_4bit(packed, state)
            settings = {"load_in_4bit": True, "bnb_4bit_quant_type": table, "quant_method": "bitsandbytes"}
            label = f"{table}, double" if nested else table
            yield row("bitsandbytes", label, settings, {"weight": packed, **parts}, unpacked)
    codes, largest, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    unpacked = functional.int8_vectorwise_dequant(codes, largest).to(torch.float16)
    settings = {"load_in_8bit": True, "quant_method": "bitsandbytes"}
    yield row("bitsandbytes", "8 bits", settings, {"weight": codes, "SCB": largest}, unpacked)


def from_torchao() -> Rows:
    """Quantise a layer, and flatten it as transformers does."""
    import torch
    from torchao import quantization as ao  # type: ignore[import-not-found]
    from torchao.prototype.safetensors.safetensors_support import (  # type: ignore[import-not-found]
        flatten_tensor_state_dict,
    )

    group = ao.PerGroup(32)
    kinds = {
        "int8": ao.Int8WeightOnlyConfig(),
        "fp8": ao.Float8WeightOnlyConfig(),
        "int4 in bytes": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "int3 in bytes, zero points": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int3, granularity=group, mapping_type=ao.MappingType.ASYMMETRIC
        ),
    }
    for label, config in kinds.items():
        layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        layer.weight.data = _weight()
        ao.quantize_(layer, config)
        parts, notes = flatten_tensor_state_dict({"m.weight": layer.weight.data})
        named = {name.removeprefix("m."): value for name, value in parts.items()}
        settings = {"quant_method": "torchao", "quant_type": {"default": {}}}
        found = row("torchao", label, settings, named, layer.weight.data.dequantize())
        yield found | {"notes": notes}


def from_hqq() -> Rows:
    """Quantise a layer on both axes."""
    import torch
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear  # type: ignore[import-not-found]

    for bits in (8, 4, 3, 2, 1):
        for axis in (0, 1) if bits in (3, 4) else (1,):
            linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
            linear.weight.data = _weight()
            config = BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis)
            layer = HQQLinear(linear, quant_config=config, compute_dtype=torch.float32, device="cpu")
            parts = {name: value for name, value in layer.state_dict().items() if value is not None}
            settings = {"quant_method": "hqq", "quant_config": config}
            yield row("hqq", f"{bits} bits, axis {axis}", settings, parts, layer.dequantize())


def _tiny() -> Any:
    """Return a model with one layer, whose down projection has ``ROWS`` outputs and ``COLUMNS`` inputs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=ROWS,
        intermediate_size=COLUMNS,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=64,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config).eval()


def _exported(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings in a folder, and the parts of its down projection."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    prefix = f"{_MODULE}."
    return settings, {
        name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
    }


def from_modelopt() -> Rows:
    """Export a model, and take what its own quantizer makes of the weight."""
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]
    import torch
    from modelopt.torch.export import export_hf_checkpoint  # type: ignore[import-not-found]
    from modelopt.torch.quantization.qtensor import NVFP4QTensor  # type: ignore[import-not-found]

    kinds = {
        "fp8": mtq.FP8_DEFAULT_CFG,
        "fp8, blocks": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
        "nvfp4": mtq.NVFP4_DEFAULT_CFG,
        "int8": mtq.INT8_WEIGHT_ONLY_CFG,
    }
    for label, config in kinds.items():
        model = mtq.quantize(_tiny(), config, lambda m: m(torch.arange(32)[None]))
        layer = model.get_submodule(_MODULE)
        weight, quantizer = layer.weight.detach().clone(), layer.weight_quantizer
        # Of groups of 16 the quantizer needs a GPU, and what unpacks the exported file does not.
        unpacked = None if label == "nvfp4" else quantizer(weight).clone()
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(model, dtype=torch.float32, export_dir=folder)
            settings, parts = _exported(Path(folder))
        if unpacked is None:
            unpacked = NVFP4QTensor(weight.shape, torch.float32, parts["weight"]).dequantize(
                scale=parts["weight_scale"], double_scale=parts["weight_scale_2"], block_sizes={-1: 16}
            )
        yield row("nvidia-modelopt", label, settings, parts, unpacked)


def from_quark() -> Rows:
    """Export a model, and take the weight that freezing left in it."""
    from quark.torch import ModelQuantizer, export_safetensors  # type: ignore[import-not-found]
    from quark.torch.quantization.config import config as q  # type: ignore[import-not-found]

    numbers = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
    kinds: Mapping[str, Any] = {
        "int4": q.Int4PerGroupSpec(symmetric=True, ch_axis=1, group_size=32, **numbers),
        "uint4": q.Uint4PerGroupSpec(symmetric=False, ch_axis=1, group_size=32, **numbers),
        "int8, groups": q.Int8PerGroupSpec(symmetric=True, ch_axis=1, group_size=32, **numbers),
        "int8": q.Int8PerChannelSpec(symmetric=True, ch_axis=0, **numbers),
        "fp8": q.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        "mxfp4": q.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    }
    for label, spec in kinds.items():
        layers = q.QLayerConfig(weight=spec.to_quantization_spec())
        quantizer = ModelQuantizer(q.QConfig(global_quant_config=layers, exclude=["lm_head"]))
        model = quantizer.freeze(quantizer.quantize_model(_tiny()))
        unpacked = model.get_submodule(_MODULE).weight.detach().clone()
        with tempfile.TemporaryDirectory() as folder:
            export_safetensors(model=model, output_dir=folder)
            settings, parts = _exported(Path(folder))
        yield row("amd-quark", label, settings, parts, unpacked)


def from_quanto() -> Rows:
    """Quantise a layer in each type, with and without groups, and take its parts as a folder has them."""
    import torch
    from optimum import quanto  # type: ignore[import-not-found]
    from optimum.quanto.tensor.weights import qbits  # type: ignore[import-not-found]

    for kind, columns, whole in (
        ("qint8", COLUMNS, False),
        ("qfloat8", COLUMNS, False),
        ("qint4", COLUMNS, False),
        ("qint2", 5 * 32, False),
        ("qint4", 5 * 32, False),
        ("qint4", 5 * 32, True),
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(columns, ROWS - 1, bias=False))
        model[0].weight.data /= 8
        quanto.quantize(model, weights=kind)
        quanto.freeze(model)
        weight, settings = model[0].weight, {"m": quanto.quantization_map(model)["0"]}
        if whole:  # as its optimizers do when they are told to
            scale, shift = quanto.MaxOptimizer()(weight.dequantize(), quanto.qint4, 0, 32, zeropoint=True)
            model[0].weight.data = qbits.WeightQBitsTensor.quantize(
                weight.dequantize(), quanto.qint4, 0, 32, scale, shift, optimized=False
            )
        parts = {name.removeprefix("0."): value for name, value in model.state_dict().items()}
        parts = {name: value for name, value in parts.items() if name.startswith("weight")}
        label = f"{kind}, {columns} inputs{', whole shifts' if whole else ''}"
        found = row("optimum-quanto", label, settings, parts, model[0].weight.dequantize())
        yield found | {"file": "quanto_qmap.json"}


_TOOLS: Final[Mapping[str, Callable[[], Rows]]] = {
    "bitsandbytes": from_bitsandbytes,
    "torchao": from_torchao,
    "hqq": from_hqq,
    "modelopt": from_modelopt,
    "quark": from_quark,
    "optimum.quanto": from_quanto,
}


if __name__ == "__main__":
    main()
