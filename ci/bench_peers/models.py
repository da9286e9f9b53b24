"""The model in the form that each peer takes, all made from one GGUF file.

``python -m bench_peers.models FOLDER GGUF [PREFIX]`` finds the peers' environments in FOLDER, where
``ci/peers`` put them, and adds the models that are missing, under names that begin with PREFIX. A model is
made beside its place and renamed, so that one that stands is whole.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench_peers.cli import exit_if_refused
from bench_peers.processes import run_process
from llorch_serve.errors import UsageError
from llorch_serve.python_child import foreign_module_command
from llorch_serve.terminal.console import say

_OPENVINO_INT4: Final = ("--weight-format", "int4", "--group-size", "64", "--ratio", "1.0", "--sym")
_GENAI_INT4: Final = ("-p", "int4", "-e", "cpu", "--extra_options", "int4_accuracy_level=4")
_LLAMA_CPP: Final = Path(__file__).resolve().parent.parent / "measure" / "run_llamacpp.py"


@dataclass(frozen=True, slots=True)
class PeersFolder:
    """Where peers live. Raises UsageError from :meth:`require` if one is missing.

    prefix: what the names of a model's folders begin with; empty for SmolLM2's. Other models are converted in
    an environment with transformers 4, and onnxruntime-genai's builder, which asks for 5, makes none of them:
    it fails on rotary settings by kind of layer, as 5 has them.
    """

    root: Path
    prefix: str = ""

    @property
    def main_python(self) -> Path:
        """The interpreter with llama-cpp-python and onnxruntime-genai."""
        return self.root / "main" / "bin" / "python"

    @property
    def openvino_python(self) -> Path:
        """The interpreter with OpenVINO GenAI and optimum-intel."""
        return self.root / "ov" / "bin" / "python"

    @property
    def optimum_cli(self) -> Path:
        """The command that converts for OpenVINO."""
        return self.root / ("convert" if self.prefix else "ov") / "bin" / "optimum-cli"

    @property
    def checkpoint(self) -> Path:
        """The GGUF file's weights, widened to float32, as a Hugging Face folder: what converters read."""
        return self.root / f"{self.prefix or 'smollm2-'}hf"

    @property
    def genai(self) -> Path:
        """The folder that onnxruntime-genai's model builder made."""
        return self.root / f"{self.prefix}genai-int4"

    @property
    def openvino(self) -> Path:
        """The folder that optimum-intel made."""
        return self.root / f"{self.prefix}ov-int4"

    @property
    def llama_build(self) -> Path:
        """The file that says how llama.cpp was built, where that is not as pip does it by itself."""
        return self.root / "main" / ".llama-build"

    @property
    def openvino_int8(self) -> Path:
        """The same in int8, which :func:`make_openvino_int8` makes."""
        return self.root / f"{self.prefix}ov-int8"

    def require(self) -> None:
        """Raise UsageError if anything is missing."""
        built = () if self.prefix else (self.genai,)
        wanted = (self.main_python, self.openvino_python, *built, self.openvino)
        missing = [str(path) for path in wanted if not path.exists()]
        if missing:
            raise UsageError(
                f"{missing[0]} is not there; run ci/peers, which sets up what ci/bench compares with"
            )


def make_models(peers: PeersFolder, gguf: Path) -> None:
    """Make what is missing. Raises ResourceError, with the tool's last words, if a converter fails."""
    built = bool(peers.prefix) or peers.genai.exists()
    if not (built and peers.openvino.exists()):
        made(peers.checkpoint, lambda target: widen(gguf, target))
    if not built:
        made(
            peers.genai,
            lambda target: build_genai(peers.main_python, peers.checkpoint, target, *_GENAI_INT4),
        )
    made(peers.openvino, lambda target: _export_openvino(peers, target, *_OPENVINO_INT4))


def make_openvino_int8(peers: PeersFolder, gguf: Path) -> None:
    """Make OpenVINO's model with weights in int8, unless it is there. Raises as :func:`make_models`."""
    if not peers.openvino_int8.exists():
        made(peers.checkpoint, lambda target: widen(gguf, target))
    made(peers.openvino_int8, lambda target: _export_openvino(peers, target, "--weight-format", "int8"))


def made(place: Path, make: Callable[[Path], object]) -> None:
    """Make a file or folder, unless it is there; ``make`` is given a place beside it."""
    if place.exists():
        return
    say(f"making {place}")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
        target = Path(scratch) / place.name
        make(target)
        target.rename(place)


def widen(gguf: Path, target: Path) -> None:
    """Write a GGUF file's weights in float32 as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # says GGUF, which what is saved here no longer is
        del config.quantization_config
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.float().eval().save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    spell_as_before(target / "config.json")


def spell_as_before(file: Path) -> None:
    """Write rotary settings by kind of layer as transformers 4 has them, which 5 reads too."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    by_kind = settings.get("rope_parameters", {})
    if "sliding_attention" in by_kind:
        del settings["rope_parameters"]
        settings["rope_theta"] = by_kind["full_attention"]["rope_theta"]
        settings["rope_local_base_freq"] = by_kind["sliding_attention"]["rope_theta"]
        file.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def build_genai(python: Path, checkpoint: Path, target: Path, *flags: str) -> None:
    """Have onnxruntime-genai's model builder make a folder; ``flags`` say in which form.

    python: an interpreter that has it. Raises ResourceError if it fails.
    """
    run_process(
        *foreign_module_command(str(python), "onnxruntime_genai.models.builder"),
        *("-m", checkpoint, "-o", target, "-c", target.parent / "cache"),
        *flags,
        python_path=(),
    )


def quantize(python: Path, source: Path, target: Path, kind: str) -> None:
    """Have llama.cpp write a GGUF file in a type, as it names it (``Q8_0``).

    python: an interpreter that has llama-cpp-python. Raises ResourceError if it fails.
    """
    run_process(python, _LLAMA_CPP, "quantize", source, target, kind, python_path=())


def _export_openvino(peers: PeersFolder, target: Path, *weights: str) -> None:
    run_process(
        *(peers.optimum_cli, "export", "openvino", "--model", peers.checkpoint),
        *("--task", "text-generation-with-past"),
        *weights,
        target,
        python_path=(),
    )


def main() -> None:
    """Make the models of the folder and file that the command line names."""
    folder, gguf, *prefix = sys.argv[1:]
    exit_if_refused(lambda: make_models(PeersFolder(Path(folder), *prefix), Path(gguf)))


if __name__ == "__main__":
    main()
