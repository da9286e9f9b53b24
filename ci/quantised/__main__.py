"""usage: python -m quantised TOOL FOLDER [GGUF]: write FOLDER/TOOL-FORM for each form of a tool, out of
FOLDER/fp32, which tool ``base`` writes out of a GGUF file. What is there already stays.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from quantised import forms

TEXT: Final = Path(__file__).parents[2] / "docs" / "generation.md"  # what GPTQ is calibrated on
_CONFIG: Final = "config.json"


def main() -> None:
    """Run one tool."""
    tool, folder = sys.argv[1], Path(sys.argv[2])
    if tool == "base":
        write_base(folder / "fp32", Path(sys.argv[3]))
        return
    names, write = _TOOLS[tool]
    chosen = {form.removeprefix(f"{tool}:") for form in os.environ.get("FORMS", "").split()}
    for name in names:
        output = folder / f"{tool}-{name}"
        if (output / _CONFIG).exists() or (chosen and name not in chosen):
            continue
        partial = folder / f".{tool}-{name}"
        shutil.rmtree(partial, ignore_errors=True)
        write(folder / "fp32", partial, name)
        found = next(partial.rglob(_CONFIG)).parent  # auto-round writes a folder inside
        found.rename(output)
        shutil.rmtree(partial, ignore_errors=True)
        print(output, flush=True)  # noqa: T201


def write_base(output: Path, gguf: Path) -> None:
    """Write the weights of a GGUF file in float32."""
    if (output / _CONFIG).exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: Any = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = read.config.to_dict()
    for key in ("quantization_config", "model_type"):  # a model that was read from GGUF is not saved
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    AutoTokenizer.from_pretrained(**source).save_pretrained(output)
    model.save_pretrained(output)


def _read(base: Path, dtype: str = "bfloat16", **more: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype), **more)


def _tokenizer(base: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base)


def bitsandbytes(base: Path, output: Path, form: str) -> None:
    """Quantise while reading, as transformers does."""
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(**forms.BITSANDBYTES[form])
    _read(base, quantization_config=config, device_map="cpu").save_pretrained(output)
    _tokenizer(base).save_pretrained(output)


def torchao(base: Path, output: Path, form: str) -> None:
    """Quantise while reading, as transformers does."""
    import torch
    from torchao import quantization as ao  # type: ignore[import-not-found]
    from transformers import TorchAoConfig

    kinds = {
        "int8": ao.Int8WeightOnlyConfig(),
        "fp8": ao.Float8WeightOnlyConfig(),
        "int4-g64": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(64)),
    }
    config = TorchAoConfig(kinds[form])
    _read(base, quantization_config=config, device_map="cpu").save_pretrained(output)
    _tokenizer(base).save_pretrained(output)


def hqq(base: Path, output: Path, form: str) -> None:
    """Quantise layer by layer, and store them as transformers 4 did; 5 has no HQQ yet."""
    import json

    import torch
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear  # type: ignore[import-not-found]
    from safetensors.torch import save_file

    model, config = _read(base), BaseQuantizeConfig(**forms.HQQ[form])
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    state = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight" and name.rsplit(".", 1)[0] not in layers
    }
    for name, module in layers.items():
        layer = HQQLinear(module, config, compute_dtype=torch.bfloat16, device="cpu", del_orig=False)
        parts = layer.state_dict().items()
        state |= {f"{name}.{part}": value.contiguous() for part, value in parts if value is not None}
    _tokenizer(base).save_pretrained(output)
    save_file(state, output / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((base / _CONFIG).read_text())
    settings["quantization_config"] = {
        "quant_method": "hqq",
        "quant_config": config,
        "skip_modules": ["lm_head"],
    }
    (output / _CONFIG).write_text(json.dumps(settings))


def quanto(base: Path, output: Path, form: str) -> None:
    """Quantise without a text, and save as it does itself."""
    from optimum.quanto import QuantizedModelForCausalLM  # type: ignore[import-not-found]

    model = QuantizedModelForCausalLM.quantize(_read(base), weights=forms.QUANTO[form], exclude="lm_head")
    model.save_pretrained(output)
    _tokenizer(base).save_pretrained(output)


def modelopt(base: Path, output: Path, form: str) -> None:
    """Calibrate on one sentence, and export."""
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]
    from modelopt.torch.export import export_hf_checkpoint  # type: ignore[import-not-found]

    tokenizer = _tokenizer(base)
    ids = tokenizer("The quick brown fox jumps over the lazy dog. " * 8, return_tensors="pt").input_ids
    model = mtq.quantize(_read(base), getattr(mtq, forms.MODELOPT[form]), lambda m: m(ids))
    export_hf_checkpoint(model, export_dir=output)
    tokenizer.save_pretrained(output)


def quark(base: Path, output: Path, form: str) -> None:
    """Round to nearest, and export."""
    from quark.torch import ModelQuantizer, export_safetensors  # type: ignore[import-not-found]
    from quark.torch.quantization.config import config as q  # type: ignore[import-not-found]

    numbers = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
    kinds = {
        "int4-g64": q.Int4PerGroupSpec(symmetric=True, ch_axis=1, group_size=64, **numbers),
        "uint4-g64": q.Uint4PerGroupSpec(symmetric=False, ch_axis=1, group_size=64, **numbers),
        "int8": q.Int8PerChannelSpec(symmetric=True, ch_axis=0, **numbers),
        "fp8": q.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        "mxfp4": q.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    }
    layers = q.QLayerConfig(weight=kinds[form].to_quantization_spec())
    quantizer = ModelQuantizer(q.QConfig(global_quant_config=layers, exclude=["lm_head"]))
    model = quantizer.freeze(quantizer.quantize_model(_read(base).eval()))
    export_safetensors(model=model, output_dir=str(output))
    _tokenizer(base).save_pretrained(output)


def llmcompressor(base: Path, output: Path, form: str) -> None:
    """Round to nearest, and save compressed."""
    from compressed_tensors.quantization import (  # type: ignore[import-not-found]
        QuantizationArgs,
        QuantizationScheme,
    )
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import (  # type: ignore[import-not-found]
        QuantizationModifier,
    )

    chosen = forms.LLMCOMPRESSOR[form]
    if isinstance(chosen, str):
        recipe = QuantizationModifier(ignore=["lm_head"], targets=["Linear"], scheme=chosen)
    else:
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**chosen))
        recipe = QuantizationModifier(ignore=["lm_head"], config_groups={"group_0": scheme})
    model = _read(base)
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(output, save_compressed=True)
    _tokenizer(base).save_pretrained(output)


def autoround(base: Path, output: Path, form: str) -> None:
    """Round to nearest, and write the tool's own packing or another tool's."""
    from auto_round import AutoRound  # type: ignore[import-not-found]

    packing, settings = forms.AUTOROUND[form]
    model = _read(base, "float32")
    rounding = AutoRound(model, _tokenizer(base), iters=0, disable_opt_rtn=True, device_map="cpu", **settings)
    rounding.quantize_and_save(str(output), format=packing)


def gptqmodel(base: Path, output: Path, form: str) -> None:
    """Calibrate on a page of the documents."""
    from gptqmodel import GPTQModel, QuantizeConfig  # type: ignore[import-not-found]

    texts = [part for part in TEXT.read_text().split("\n\n") if len(part) > 200]
    model = GPTQModel.load(str(base), QuantizeConfig(**forms.GPTQMODEL[form]), device="cpu")
    model.quantize(texts[:4], batch_size=4)
    model.save(str(output))


_TOOLS: Final[Mapping[str, tuple[Iterable[str], Callable[[Path, Path, str], None]]]] = {
    "bitsandbytes": (forms.BITSANDBYTES, bitsandbytes),
    "torchao": (("int8", "fp8", "int4-g64"), torchao),
    "hqq": (forms.HQQ, hqq),
    "quanto": (forms.QUANTO, quanto),
    "modelopt": (forms.MODELOPT, modelopt),
    "quark": (("int4-g64", "uint4-g64", "int8", "fp8", "mxfp4"), quark),
    "llmcompressor": (forms.LLMCOMPRESSOR, llmcompressor),
    "autoround": (forms.AUTOROUND, autoround),
    "gptqmodel": (forms.GPTQMODEL, gptqmodel),
}


if __name__ == "__main__":
    main()
