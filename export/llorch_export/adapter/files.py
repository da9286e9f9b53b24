"""The files of an adapter's folder: its config, and its tensors by name.

Input is an untrusted folder as PEFT, Unsloth, axolotl or transformers leave it; output are JSON and places in
safetensors files. Pickles are never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.checkpoint.safetensors_file import file_tensors
from llorch_export.checkpoint.stream import TensorRange
from llorch_export.config.fields import listed, quoted
from llorch_serve.errors import ArtifactError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
INDEX: Final = "adapter_model.safetensors.index.json"
_PICKLE: Final = "adapter_model.bin"
_EXPECTED: Final = f"--lora takes a PEFT folder with {CONFIG} and {WEIGHTS}"
_CONVERT: Final = (
    'python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous() for k, v in '
    f"torch.load('{_PICKLE}', weights_only=True, map_location='cpu').items()}}, '{WEIGHTS}')\""
)
_MAX_SHARDS: Final = 1000


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as it lies on disk. content: the files that were read, in a fixed order."""

    folder: ModelFolder
    config: Mapping[str, object]
    tensors: Mapping[str, TensorRange]
    content: tuple[Path, ...]

    @property
    def origin(self) -> str:
        """The config's path, for errors."""
        return str(self.folder.path / CONFIG)

    @property
    def weights(self) -> str:
        """The path of the tensors, or of the first of several files, for errors."""
        return str(next(iter(self.tensors.values())).path)


def read_files(path: Path) -> AdapterFiles:
    """Read the config and the tensors' places.

    Raises ArtifactError if the folder is none of an adapter, or if a file is missing, damaged or a pickle.
    """
    if not path.is_dir():
        raise ArtifactError(f"{str(path)[:200]} is no folder; {_EXPECTED}")
    folder = ModelFolder(path)
    config = folder.read_json(CONFIG)
    if config is None:
        raise ArtifactError(f"{path} has no {CONFIG}; {_EXPECTED}{_checkpoints(path)}")
    weights = _weight_files(folder)
    tensors: dict[str, TensorRange] = {}
    for file in weights:
        for name, stored in file_tensors(file, folder).items():
            if name in tensors:
                raise ArtifactError(
                    f"{file} and {tensors[name].path.name} both hold tensor {quoted(name)}; "
                    "save the adapter again"
                )
            tensors[name] = stored.source
    if not tensors:
        raise ArtifactError(
            f"{weights[0]} holds no tensors; save the adapter again with PEFT's save_pretrained"
        )
    files = (folder.find(CONFIG), folder.find(INDEX), *weights)
    return AdapterFiles(folder, config, tensors, tuple(file for file in files if file is not None))


def _weight_files(folder: ModelFolder) -> tuple[Path, ...]:
    single = folder.find(WEIGHTS)
    if single is not None:
        return (single,)
    index = folder.read_json(INDEX)
    if index is not None:
        return _shards(folder, index)
    if folder.find(_PICKLE) is not None:
        raise ArtifactError(
            f"{folder.path} has no {WEIGHTS}, and {_PICKLE} is never read, because loading it can run code. "
            f"If you trust it, convert it there with: {_CONVERT}"
        )
    raise ArtifactError(f"{folder.path} has no {WEIGHTS}; save the adapter with PEFT's save_pretrained")


def _shards(folder: ModelFolder, index: Mapping[str, object]) -> tuple[Path, ...]:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise ArtifactError(f"{folder.path / INDEX} has no weight_map of tensor names to file names")
    names = sorted(set(where.values()))
    if len(names) > _MAX_SHARDS or not all(name.endswith(".safetensors") for name in names):
        raise ArtifactError(f"{folder.path / INDEX} names {names[0][:80]!r}, expected .safetensors files")
    found = {name: folder.find(name) for name in names}
    missing = [name for name, file in found.items() if file is None]
    if missing:
        raise ArtifactError(
            f"{folder.path} lacks {listed(missing)}, which {INDEX} names; fetch the adapter again"
        )
    return tuple(file for file in found.values() if file is not None)


def _checkpoints(path: Path) -> str:
    """Return a hint at adapters one level down, where trainers keep those of single steps."""
    try:
        names = sorted(entry.name for entry in path.iterdir() if (entry / CONFIG).is_file())
    except OSError:
        return ""
    return f". Did you mean {path / names[-1]}?" if names else ""
