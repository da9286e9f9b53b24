"""What to do about a folder that holds weights, but none in the files that are read.

Input are the names of its files; output is the end of an error message. Nothing but its config is opened.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from llorch_export.checkpoint.folder import ModelFolder

NEVER_READ: Final = "weights in .bin, .pt or .pth files are never read, because loading them can run code"

_PICKLES: Final = (".bin", ".pt", ".pth")
_CONVERTED: Final = re.compile(r"pytorch_model.*\.bin")
_SHARD: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
# torch's own reader, limited to tensors, runs nothing. The copies keep apart what shares memory, which
# safetensors files cannot hold.
_SCRIPT: Final = (
    "import glob, os, sys, torch; from safetensors.torch import save_file; "
    "save_file({name: tensor.clone().contiguous() "
    "for path in sorted(glob.glob(os.path.join(glob.escape(sys.argv[1]), 'pytorch_model*.bin'))) "
    "for name, tensor in torch.load(path, map_location='cpu', weights_only=True).items()}, "
    "os.path.join(sys.argv[1], 'model.safetensors'), metadata={'format': 'pt'})"
)

_TORCHAO_SCRIPT: Final = (
    "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; "
    "[kind.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2]) "
    "for kind in (AutoModelForCausalLM, AutoTokenizer)]"
)


def _convert_torchao(folder: Path) -> str:
    """Return what to do about pickles of torchao, which hold its own classes."""
    there, new = (shlex.quote(str(path)) for path in (folder, folder.with_name(f"{folder.name}-safetensors")))
    return (
        f"{NEVER_READ}; they are packed by torchao, which converts them, in an environment with: "
        f"pip install 'transformers>=5' torchao. Then run: python -c \"{_TORCHAO_SCRIPT}\" {there} {new}"
    )


def convert_pickle(folder: Path) -> str:
    """Return what to do about weights that are only there as pickles: the command that converts them."""
    return (
        f"{NEVER_READ}; convert them with torch 2.6 or later, which reads them without running any: "
        f'python -c "{_SCRIPT}" {shlex.quote(str(folder))}'
    )


def advice(folder: ModelFolder, *, single: str, index: str) -> str:
    """Return what to do in a folder that has neither ``single`` nor ``index``."""
    others = [path.name for path in folder.files(lambda name: name.endswith((*_PICKLES, ".safetensors")))]
    if not others:
        return "expected a Hugging Face model folder or a GGUF file"
    found = f"found {', '.join(others[:4])}"
    if any(_CONVERTED.fullmatch(name) for name in others):
        settings = (folder.read_json("config.json") or {}).get("quantization_config")
        if isinstance(settings, dict) and settings.get("quant_method") == "torchao":
            return f"{found}: {_convert_torchao(folder.path)}"
        return f"{found}: {convert_pickle(folder.path)}"
    if "adapter_model.safetensors" in others:
        return f"{found}: it is an adapter; give the model it was made for, and the adapter with --lora"
    if any(_SHARD.fullmatch(name) for name in others):
        return f"{found}: fetch {index} too, which says which of them make up the model"
    if any(name.startswith("consolidated.") for name in others):
        return (
            f"{found}, in the layout of its maker's own code; fetch {single}, or {index} with its shards, "
            "from the same repository or from one whose name ends in -hf"
        )
    if all(name.endswith(_PICKLES) for name in others):
        return f"{found}: {NEVER_READ}; fetch the model's safetensors files, save_pretrained writes them"
    return f"{found}: files of other names are not looked for; if it is the model call it {single}"
