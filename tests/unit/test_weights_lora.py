"""An adapter is merged as its definition says, or refused by the name of what cannot be; half a merge answers
fluently.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.adapter.apply import with_adapters
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.options import ExportOptions
from llorch_export.preview import preview
from llorch_export.source.open import fingerprint, open_checkpoint
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError
from support.builders.adapters import SHAPES, Factors, write_adapter
from support.builders.checkpoints import tiny_llama_config, tiny_weights, write_gguf, write_hf_folder
from support.builders.tiny_exports import export_tiny

CONFIG = tiny_llama_config()
UP = "base_model.model.model.layers.0.mlp.up_proj"


def base(folder: Path, kind: str = "folder") -> Path:
    return write_gguf(folder / "m.gguf") if kind == "gguf" else write_hf_folder(folder / "m")


def merged(config: LlamaConfig, factors: Factors, scaling: Callable[[str], float]) -> dict[str, Any]:
    """Return all weights by the definition, in float64."""
    weights = {name: value.astype(np.float64) for name, value in tiny_weights(config).items()}
    for name, a in factors.items():
        if name.endswith(".a"):
            module = name.removesuffix(".a")
            weights[f"{module}.weight"] += scaling(module) * (factors[f"{module}.b"].astype(np.float64) @ a)
    return weights


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({}, lambda module: 6 / 4),
        ({"use_rslora": True}, lambda module: 6 / 2),
        ({"fan_in_fan_out": True}, lambda module: 6 / 4),
        ({"target_modules": r".*\.(q_proj|v_proj|down_proj)"}, lambda module: 6 / 4),
        ({"layers": [1], "layers_to_transform": [1]}, lambda module: 6 / 4),
        (
            {"ranks": {"q_proj": 2}, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 1}},
            lambda module: 1 / 4 if module.endswith("1.self_attn.v_proj") else 6 / 2 if "q_proj" in module else 6 / 4,
        ),
    ],
)  # fmt: skip
def test_weights_are_w_plus_scaling_b_a_rounded_once(
    tmp_path: Path, kind: str, options: dict[str, Any], scaling: Callable[[str], float]
) -> None:
    factors = write_adapter(tmp_path / "lora", CONFIG, **options)
    checkpoint = with_adapters(
        open_checkpoint(str(base(tmp_path, kind))), (AdapterChoice(tmp_path / "lora"),)
    )
    for name, expected in merged(CONFIG, factors, scaling).items():
        found = checkpoint.tensors[name].load()
        np.testing.assert_array_almost_equal_nulp(found, expected.astype(np.float32), nulp=1)
        np.testing.assert_array_equal(checkpoint.tensors[name].load_rows(3, 9), found[3:9], err_msg=name)


def test_the_adapter_is_part_of_the_source(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", CONFIG)
    write_adapter(tmp_path / "two", CONFIG, lora_alpha=7)
    source = base(tmp_path)
    plain = open_checkpoint(str(source))
    prints = {
        fingerprint(c)
        for c in (plain, *(with_adapters(plain, (AdapterChoice(tmp_path / n),)) for n in ("one", "two")))
    }
    assert len(prints) == 3
    artifact = export_tiny(source, tmp_path / "out", lora=(AdapterChoice(tmp_path / "one"),))
    assert artifact.manifest.source.adapter == "one"
    assert artifact.manifest.source.fingerprint in prints
    again = export_tiny(source, tmp_path / "out", lora=(AdapterChoice(tmp_path / "two"),), if_changed=True)
    assert again.manifest.source.adapter == "two"
    assert again.manifest.fingerprint != artifact.manifest.fingerprint
    assert export_tiny(source, tmp_path / "out", force=True).manifest.source.adapter is None


def test_a_merged_weight_no_longer_claims_the_storage_type_of_its_base(tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", CONFIG)
    source = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", weight_type="Q8_0")))
    tensors = with_adapters(source, (AdapterChoice(tmp_path / "lora"),)).tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == "F32"
    assert tensors["model.layers.0.self_attn.k_proj.weight"].dtype == "Q8_0"


def refusal(tmp_path: Path, **options: Any) -> str:
    write_adapter(tmp_path / "lora", CONFIG, **options)
    with pytest.raises(ArtifactError) as caught:
        with_adapters(open_checkpoint(str(base(tmp_path))), (AdapterChoice(tmp_path / "lora"),))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("peft_type", "IA3"),
        ("modules_to_save", ["lm_head"]),
        ("bias", "some"),
        ("use_dora", True),
        ("lora_bias", True),
        ("use_qalora", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("target_parameters", ["mlp.experts"]),
        ("exclude_modules", ["q_proj"]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("layers_to_transform", ["1"]),
        ("alora_invocation_tokens", [1, 2]),
        ("kasa_config", {"beta": 1}),
        ("use_bdlora", {"nblocks": 2}),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "later_kind"),
        ("trainable_token_indices", [1, 1]),
        ("trainable_token_indices", {"embed_tokens": [-1]}),
        ("modules_to_save", "lm_head"),
        ("rank_pattern", {"(?=layers).*q_proj": 2}),
        ("alpha_pattern", {"(q_proj": 2}),
        ("alpha_pattern", {"q_proj": -1}),
        ("rank_pattern", {f"(.?){{400}}{n}": 4 for n in range(9)}),
        ("r", 0),
        ("lora_alpha", "much"),
        ("target_modules", []),
        ("target_modules", None),
        ("use_new_thing", True),
        ("new_mode", "other"),
        ("new_tokens", [1]),
        ("new_config", {"a": 1}),
        ("enable_lora", [True, False, True]),
    ],
)
def test_what_is_more_than_two_factors_is_refused_by_name(
    tmp_path: Path, setting: str, value: object
) -> None:
    assert setting in refusal(tmp_path, **{setting: value})


def drop(key: str) -> Callable[[Factors], None]:
    return lambda factors: factors.__delitem__(key)


def add(key: str, *shape: int) -> Callable[[Factors], None]:
    return lambda factors: factors.update({key: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (add("base_model.model.score.weight", 2, 64), "adapts score"),
        (add("base_model.model.lm_head.vera_lambda_b", 64), "base_model.model.lm_head.vera_lambda_b"),
        (add("base_model.model.lm_head.weight", 512, 32), "lm_head has weight [512, 32], expected weight [512, 64]"),
        (add("base_model.model.lm_head.weight", 600, 64), "resizes one table alone"),
        (add(f"{UP}.bias", 96), "expected no bias"),
        (add("base_model.model.model.embed_tokens.lora_embedding_A", 4, 512), "adapters for 1 modules: model.embed_tokens"),
        (add("base_model.model.model.layers.0.self_attn.q_proj.lora_A.other.weight", 4, 64), "are the same part"),
        (add(f"{UP}.lora_magnitude_vector", 96), "lora_magnitude_vector"),
        (add(f"{UP}.lora_A.weight", 4, 64), "against the config, adapters for 1 modules: "
            "model.layers.0.mlp.up_proj"),
        (add("base_model.model.layers.0.q_proj.lora_A.weight", 4, 64), "adapters for 1 modules: "
            "layers.0.q_proj"),
        (lambda factors: factors.clear(), "holds no tensors"),
        (drop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"), "lora_B []"),
        (
            lambda factors: [factors.pop(key) for key in list(factors) if "layers.1" in key] and None,
            "lacks adapters for 3 modules: model.layers.1.mlp.down_proj",
        ),
        (add("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", 3, 64), "lora_A [3, 64]"),
        (add("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", 32, 4), "lora_B [32, 4]"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, edit: Callable[[Factors], None], message: str
) -> None:
    assert message in refusal(tmp_path, edit=edit)


def test_a_factor_that_is_not_finite_is_refused_when_it_is_read(tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"

    def damage(factors: Factors) -> None:
        factors[key][2, 1] = np.nan

    write_adapter(tmp_path / "lora", CONFIG, edit=damage)
    with pytest.raises(ArtifactError, match=r"q_proj\.lora_B\.weight holds NaN"):
        export_tiny(base(tmp_path), tmp_path / "out", lora=(AdapterChoice(tmp_path / "lora"),))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [("adapter_model.safetensors", "never read"), ("adapter_config.json", "has no adapter_config.json")],
)
def test_an_incomplete_folder_is_refused(tmp_path: Path, missing: str, message: str) -> None:
    write_adapter(tmp_path / "lora", CONFIG)
    (tmp_path / "lora" / missing).rename(tmp_path / "lora" / "adapter_model.bin")
    with pytest.raises(ArtifactError, match=message):
        with_adapters(open_checkpoint(str(base(tmp_path))), (AdapterChoice(tmp_path / "lora"),))


def test_no_folder_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is no folder"):
        with_adapters(open_checkpoint(str(base(tmp_path))), (AdapterChoice(tmp_path / "lora"),))


def test_a_preview_refuses_what_the_export_would(tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", CONFIG, use_dora=True)
    options = ExportOptions(
        source=str(base(tmp_path)), output=tmp_path / "out", lora=(AdapterChoice(tmp_path / "lora"),)
    )
    with pytest.raises(ArtifactError, match="use_dora"):
        preview(options)


def test_several_adapters_are_summed_with_their_weights(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", CONFIG)
    two = write_adapter(
        tmp_path / "two", CONFIG, ranks={"q_proj": 2}, rank_pattern={"q_proj": 2}, lora_alpha=3
    )
    choices = (AdapterChoice(tmp_path / "one"), AdapterChoice(tmp_path / "two", -0.5))
    checkpoint = with_adapters(open_checkpoint(str(base(tmp_path))), choices)
    expected = {name: value.astype(np.float64) for name, value in tiny_weights(CONFIG).items()}
    for factors, scaling in ((one, lambda r: 6 / r), (two, lambda r: -0.5 * 3 / r)):
        for name, a in factors.items():
            if name.endswith(".a"):
                module = name.removesuffix(".a")
                product = factors[f"{module}.b"].astype(np.float64) @ a
                expected[f"{module}.weight"] += scaling(len(a)) * product
    for name, value in expected.items():
        found = checkpoint.tensors[name].load()
        np.testing.assert_array_almost_equal_nulp(found, value.astype(np.float32), nulp=1)


def test_weights_are_part_of_the_source_and_of_the_manifest(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_adapter(tmp_path / name, CONFIG)
    source = base(tmp_path)
    seen = set()
    for first, second, told in (
        (1.0, 1.0, "one + two"),
        (0.5, 1.0, "one=0.5 + two"),
        (1.0, 0.5, "one + two=0.5"),
    ):
        choices = (AdapterChoice(tmp_path / "one", first), AdapterChoice(tmp_path / "two", second))
        manifest = export_tiny(source, tmp_path / "out", lora=choices, force=True).manifest
        assert manifest.source.adapter == told
        seen |= {manifest.source.fingerprint}
        assert export_tiny(source, tmp_path / "out", lora=choices, if_changed=True).manifest == manifest
    assert len(seen) == 3


def saved_head(factors: Factors) -> None:
    factors["base_model.model.lm_head.weight"] = np.ones((512, 64), np.float32)


def test_what_replaces_weights_has_no_weight_and_stands_alone(tmp_path: Path) -> None:
    source = open_checkpoint(str(base(tmp_path)))
    for name in ("one", "two"):
        write_adapter(tmp_path / name, CONFIG, edit=saved_head, modules_to_save=["lm_head"])
    write_adapter(tmp_path / "plain", CONFIG)
    with pytest.raises(
        ArtifactError, match=r"replaces or rescales lm_head\.weight, which cannot be done 0\.5"
    ):
        with_adapters(source, (AdapterChoice(tmp_path / "one", 0.5),))
    with pytest.raises(ArtifactError, match=r"two adapters change lm_head\.weight"):
        with_adapters(source, tuple(AdapterChoice(tmp_path / name) for name in ("one", "two")))
    both = with_adapters(source, (AdapterChoice(tmp_path / "plain", 2.0), AdapterChoice(tmp_path / "one")))
    assert (both.tensors["lm_head.weight"].load() == 1).all()


def test_a_bias_that_no_graph_has_is_refused(tmp_path: Path) -> None:
    def edit(factors: Factors) -> None:
        factors |= {
            "base_model.model.lm_head.lora_A.weight": np.ones((4, 64), np.float32),
            "base_model.model.lm_head.lora_B.weight": np.ones((512, 4), np.float32),
            "base_model.model.lm_head.lora_B.bias": np.ones(512, np.float32),
        }
        for key in list(factors):
            if "lm_head" not in key:
                del factors[key]

    assert "lm_head.bias" in refusal(tmp_path, edit=edit, target_modules=["lm_head"], lora_bias=True)


def test_a_saved_module_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert "lacks the weights of lm_head" in refusal(tmp_path, modules_to_save=["lm_head"])


def test_single_tokens_of_tied_tables_beside_an_adapted_head_are_refused(tmp_path: Path) -> None:
    def edit(factors: Factors) -> None:
        factors |= {
            "base_model.model.lm_head.lora_A.weight": np.ones((4, 64), np.float32),
            "base_model.model.lm_head.lora_B.weight": np.ones((512, 4), np.float32),
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones(
                (1, 64), np.float32
            ),
        }

    tied = {"tie_word_embeddings": True}
    write_adapter(
        tmp_path / "lora",
        tiny_llama_config(**tied),
        edit=edit,
        trainable_token_indices=[3],
        target_modules=["q_proj", "v_proj", "down_proj", "lm_head"],
    )
    source = open_checkpoint(str(write_hf_folder(tmp_path / "m", tied)))
    with pytest.raises(ArtifactError, match="adapted otherwise too"):
        with_adapters(source, (AdapterChoice(tmp_path / "lora"),))


def with_tensor(*tensors: tuple[str, int, int]) -> Callable[[Factors], None]:
    """Return an edit that adds tensors, each given by name and shape."""
    return lambda stored: stored.update(
        {f"base_model.model.{name}": np.ones(shape, np.float32) for name, *shape in tensors}
    )


TOKENS = ("model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 64)
TABLES = {
    "lm_head": (("lm_head.lora_A.weight", 4, 64), ("lm_head.lora_B.weight", 512, 4)),
    "embed_tokens": (
        ("model.embed_tokens.lora_embedding_A", 4, 512),
        ("model.embed_tokens.lora_embedding_B", 64, 4),
    ),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("second", ["lm_head", "embed_tokens"])
def test_trained_tokens_and_another_adapter_of_their_table_are_refused(
    tmp_path: Path, second: str, order: tuple[int, int]
) -> None:
    """An order would decide the rows, or the tables come apart; the sum of both is nothing that was trained."""
    folder = write_hf_folder(tmp_path / "model", {"tie_word_embeddings": True})
    config = tiny_llama_config(tie_word_embeddings=True)
    write_adapter(tmp_path / "0", config, trainable_token_indices=[3, 4], edit=with_tensor(TOKENS))
    write_adapter(
        tmp_path / "1",
        config,
        target_modules=[*SHAPES, second],
        edit=with_tensor(*TABLES[second]),
    )
    choices = [AdapterChoice(tmp_path / str(number)) for number in order]
    with pytest.raises(ArtifactError, match="trainable_token_indices of one settles rows"):
        with_adapters(open_checkpoint(str(folder)), choices)
