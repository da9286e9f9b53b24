"""fp8 weights come out as what their bits and scales say, or are refused; a lost scale would leave a model of
noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import write_hf_folder
from support.builders.raw_safetensors import KINDS, Array, load, save

FP8 = ("F8_E4M3", "F8_E5M2")
# Rows and columns that blocks of 48 do not divide, so that the last block of each is cut.
SHAPES = {"hidden_size": 80, "intermediate_size": 112, "head_dim": 16}


def fp8_folder(
    path: Path,
    *,
    block: tuple[int, int] | None,
    scale_name: str = "weight_scale_inv",
    settings: Mapping[str, object] | None = None,
    kind: str = "F8_E4M3",
) -> tuple[Path, dict[str, Array]]:
    """Pack the projections of a tiny model; return the folder and the weights by the definition, in
    float64.
    """
    write_hf_folder(path, SHAPES, seed=3)
    stored: dict[str, Array] = {}
    meant: dict[str, Array] = {}
    rng = np.random.default_rng(5)
    for name, value in load(path / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = meant[name] = value
            continue
        rows, columns = block or value.shape
        grid = (-(-value.shape[0] // rows), -(-value.shape[1] // columns))
        scale = rng.uniform(1e-3, 3e-3, grid).astype(np.float32)
        packed = (value / 2e-3).astype(KINDS[kind])
        stored[name] = packed
        stored[name.replace(".weight", f".{scale_name}")] = scale if block else scale.reshape(())
        spread = np.kron(scale, np.ones((rows, columns)))[: value.shape[0], : value.shape[1]]
        meant[name] = (packed.astype(np.float64) * spread).astype(np.float32)
    save(path / "model.safetensors", stored)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block) if block else None,
        **(settings or {}),
    }
    (path / "config.json").write_text(json.dumps(config))
    return path, meant


@pytest.mark.parametrize("kind", FP8)
def test_plain_fp8_weights_stand_for_themselves(tmp_path: Path, kind: str) -> None:
    folder = write_hf_folder(tmp_path / "m")
    packed = {name: v.astype(KINDS[kind]) for name, v in load(folder / "model.safetensors").items()}
    every = np.arange(256, dtype=np.uint8).view(KINDS[kind])
    every = every[np.isfinite(every.astype(np.float32))]
    packed["model.embed_tokens.weight"].reshape(-1)[: every.size] = every  # every value that there is
    save(folder / "model.safetensors", packed)
    tensors = open_checkpoint(str(folder)).tensors
    assert tensors.keys() == packed.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == kind
        np.testing.assert_array_equal(tensor.load(), packed[name].astype(np.float32), err_msg=name)


@pytest.mark.parametrize(("block", "scale_name"), [((48, 32), "weight_scale_inv"), (None, "weight_scale")])
def test_scaled_weights_are_the_products_rounded_once(
    tmp_path: Path, block: tuple[int, int] | None, scale_name: str
) -> None:
    folder, meant = fp8_folder(tmp_path / "m", block=block, scale_name=scale_name)
    tensors = open_checkpoint(str(folder)).tensors
    assert set(tensors) == set(meant)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.load(), meant[name], err_msg=name)
        if len(tensor.shape) == 2:
            start, stop = min(47, tensor.shape[0] - 1), min(50, tensor.shape[0])  # across a block's edge
            np.testing.assert_array_equal(
                tensor.load_rows(start, stop), meant[name][start:stop], err_msg=name
            )


def test_scales_of_activations_are_not_weights(tmp_path: Path) -> None:
    folder, meant = fp8_folder(
        tmp_path / "m", block=None, scale_name="weight_scale", settings={"activation_scheme": "static"}
    )
    stored = load(folder / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.input_scale"] = np.ones((), np.float32)
    save(folder / "model.safetensors", stored)
    assert set(open_checkpoint(str(folder)).tensors) == set(meant)


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{UP}.weight_scale_inv": None}, rf"{UP}\.weight of type F8_E4M3 has 0 scales"),
        ({f"{UP}.weight_scale": np.ones((), np.float32)}, r"has 2 scales"),
        ({f"{UP}.weight_scale_inv": np.ones((3, 2), np.float32)}, r"\[3, 2\], expected \[3, 3\]"),
        ({f"{UP}.weight_scale_inv": np.full((3, 3), np.nan, np.float32)}, rf"{UP}\.weight_scale_inv holds NaN"),
        ({f"{UP}.weight_scale_inv": np.full((3, 3), 3e38, np.float32)}, rf"{UP}\.weight holds NaN or inf"),
        ({f"{UP}.weight_scale_inv2": np.ones((3, 3), np.float32)}, r"has no use for.*weight_scale_inv2"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Mapping[str, Array | None], message: str
) -> None:
    folder, _ = fp8_folder(tmp_path / "m", block=(48, 32))
    stored = {**load(folder / "model.safetensors"), **change}
    save(folder / "model.safetensors", {name: value for name, value in stored.items() if value is not None})
    with pytest.raises(ArtifactError, match=message):
        open_checkpoint(str(folder)).tensors[f"{UP}.weight"].load()


def test_scales_without_a_config_that_explains_them_are_refused(tmp_path: Path) -> None:
    folder, _ = fp8_folder(tmp_path / "m", block=(48, 32))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"has no use for: .*weight_scale_inv"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "eetq"}, r"packed as eetq"),
        ({"quant_method": None}, r"packed as an unnamed format"),
        ({"scale_fmt": "ue4m3"}, r"scale_fmt is 'ue4m3', expected 'float'"),
        ({"fmt": "e5m2"}, r"fmt is 'e5m2'"),
        ({"weight_per_tensor": True}, r"weight_per_tensor is True, expected false"),
        ({"activation_scheme": "sometimes"}, r"activation_scheme is 'sometimes'"),
        ({"weight_block_size": [128]}, r"weight_block_size has 1 items, expected 2"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
        ({"bits": 8}, r"not understood: bits"),
    ],
)
def test_other_packings_are_refused_by_name(
    tmp_path: Path, settings: Mapping[str, object], message: str
) -> None:
    folder, _ = fp8_folder(tmp_path / "m", block=(48, 32), settings=settings)
    with pytest.raises(ArtifactError, match=message):
        open_checkpoint(str(folder))
