"""Recipes as TOML: strict keys and values, each refused by name; those shipped are whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llorch_export.calibration.measurements import BUNDLED_TEXT
from llorch_export.config.hf import config_from_hf
from llorch_export.options import ExportOptions, Rule
from llorch_export.recipes.base import base_recipe
from llorch_export.recipes.default import default_recipe, quantizer_open, unasked_recipe, with_quantizer
from llorch_export.recipes.file import (
    load_recipe,
    parse_recipe,
    shipped_recipes,
    with_prefill,
)
from llorch_export.recipes.rules import with_rules
from llorch_export.terminal.export_flags import WeightFlags
from llorch_serve.artifact.manifest import LlamaConfig, Quantizer
from llorch_serve.errors import UsageError
from support.builders.checkpoints import tiny_config

BASE = ExportOptions(source="model", output=Path("artifact"))


def test_every_key_of_a_rule_is_read() -> None:
    found = parse_recipe(
        b"""
        description = "mine"
        [defaults]
        precision = "int4"
        accuracy_level = 0
        [[rule]]
        modules = "*.v_proj"
        layers = ["first 1/8", "every 3"]
        precision = "int8"
        block_size = 16
        scale_type = "float32"
        [[rule]]
        modules = ["lm_head", "*.o_proj"]
        quantizer = "search"
        """,
        origin="mine.toml",
    )
    assert found.description == "mine"
    assert found.defaults.precision == "int4"
    assert found.defaults.accuracy_level == 0
    assert found.rules == (
        Rule(
            ("*.v_proj",),
            ("first 1/8", "every 3"),
            "int8",
            16,
            None,
            "float32",
            label="recipe mine.toml, rule 1",
        ),
        Rule(("lm_head", "*.o_proj"), quantizer="search", label="recipe mine.toml, rule 2"),
    )
    assert not found.measures


@pytest.mark.parametrize("text", ["[defaults]\nA", '[[rule]]\nmodules = "*.q_proj"\nA'])
def test_static_scales_may_be_measured(text: str) -> None:
    for form, measures in (("row", False), ("static", True)):
        found = parse_recipe(text.replace("A", f'activations = "{form}"').encode(), origin="mine.toml")
        assert found.measures == measures


def test_a_choice_by_peaks_is_measured() -> None:
    text = b'[[rule]]\nmodules = "*.down_proj"\nprecision = "fp32"\nspikiest = "6"'
    assert parse_recipe(text, origin="mine.toml").measures
    assert not parse_recipe(text.replace(b'spikiest = "6"', b""), origin="mine.toml").measures


def test_a_head_in_another_precision_than_a_recipe_s_rule_has_is_refused() -> None:
    options = load_recipe("cpu").options(replace(BASE, head_precision="fp32"))
    with pytest.raises(
        UsageError,
        match="recipe cpu, rule 1: activations row is for int8, and lm_head has precision fp32; leave",
    ):
        with_rules(base_recipe(options), options.rules, of_layers(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precision = 1 2", "is not TOML"),
        ("\xff", "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML"),
        ("default = 1", r"unknown key default \(did you mean defaults\?\)"),
        ("defaults = 3", r"\[defaults\] is 3, expected a table"),
        (
            '[defaults]\nprecison = "int4"',
            r"\[defaults\] has the unknown key precison \(did you mean precision\?\)",
        ),
        ('[defaults]\nprecision = "int3"', r"\[defaults\]: Invalid enum value 'int3'"),
        ("[defaults]\nblock_size = true", r"\[defaults\]: Expected `int \| null`, got `bool`"),
        ("description = 1", "description is 1, expected text"),
        ("rule = 1", r"rules are written as \[\[rule\]\]"),
        ("rule = [1]", "rule 1 is 1, expected a table"),
        ('[[rule]]\nprecision = "int8"', "rule 1: Object missing required field `modules`"),
        ('[[rule]]\nmodules = []\nprecision = "int8"', "rule 1: modules and layers take 1 to 256"),
        ('[[rule]]\nmodules = "a"', "rule 1 changes nothing; give it one of precision, block_size"),
        ('[[rule]]\nmodules = "a"\nblock_size = 48', "rule 1: block_size is 48; .*16, 32, 64, 128, 256"),
        (
            '[[rule]]\nmodules = "a"\nblocksize = 32',
            r"rule 1 has the unknown key blocksize \(did you mean block_size\?",
        ),
        ('[[rule]]\nmodules = "a"\nprecision = "int8"\n' * 257, "at most 256"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_recipe(text.encode("latin-1"), origin="mine.toml")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml cannot be read: No such file"):
        load_recipe(str(tmp_path / "none.toml"))
    (tmp_path / "big.toml").write_text("#" * 70_000)
    with pytest.raises(UsageError, match="larger than 65536 bytes"):
        load_recipe(str(tmp_path / "big.toml"))
    with pytest.raises(
        UsageError, match=r"no recipe is called int4-mixt \(did you mean int4-mixed\?\); shipped are cpu, "
    ):
        load_recipe("int4-mixt")


def test_a_flag_replaces_the_default_of_its_name() -> None:
    recipe = parse_recipe(
        b'[defaults]\nprecision = "int4"\nblock_size = 32\n[[rule]]\nmodules = "*"\nprecision = "int8"',
        origin="r",
    )
    plain = recipe.options(BASE)
    assert (plain.precision, plain.block_size, plain.rules) == ("int4", 32, recipe.rules)
    given = recipe.options(ExportOptions(source="m", output=Path(), precision="fp32", block_size=16))
    assert (given.precision, given.block_size, given.rules) == ("fp32", 16, recipe.rules)
    assert given.source == "m"


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_described_and_resolve(name: str) -> None:
    found = load_recipe(name)
    assert found.description
    static = name.startswith("cpu") and name != "cpu-faithful"
    assert found.measures == (name in ("int4-gptq", "cpu-faithful") or static)
    if name.endswith("-prompts"):  # which go with another recipe's transforms
        base = ExportOptions(source="m", output=Path(), transforms=("rotate", "hadamard"))
        options = with_prefill(base, name).prompts
        assert options is not None
    else:
        calibration = Path("text") if name == "int4-gptq" else None
        options = found.options(ExportOptions(source="m", output=Path(), calibration=calibration))
    base_recipe(options)


def test_a_recipe_brings_transforms_and_a_graph_for_prompts() -> None:
    options = load_recipe("cpu-calibrated").options(BASE)
    assert options.transforms == ("rotate", "hadamard", "smooth")
    assert options.calibration is not None
    assert options.calibration.read_text(encoding="utf-8")
    assert options.prompts is not None
    assert options.prompts.transforms == options.transforms
    assert {rule.outliers for rule in options.prompts.rules} == {None, "2/5"}
    assert base_recipe(options).kl_limit == 0.01
    own = ExportOptions(source="m", output=Path(), transforms=("rotate",), calibration=Path("mine"))
    given = load_recipe("cpu-calibrated").options(own)
    assert (given.transforms, given.calibration) == (("rotate",), Path("mine"))


def test_a_recipe_with_graphs_of_its_own_is_not_one_for_prompts() -> None:
    with pytest.raises(UsageError, match="recipe cpu has transforms or a prefill recipe of its own"):
        with_prefill(BASE, "cpu")


def of_layers(count: int) -> LlamaConfig:
    """Return the config of a model of 16.8 million parameters a layer."""
    return config_from_hf(tiny_config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=count))


@pytest.mark.parametrize(("layers", "name"), [(2, "cpu-calibrated"), (40, "cpu")])
def test_the_default_depends_on_the_size(layers: int, name: str) -> None:
    assert default_recipe(of_layers(layers)) == name


@pytest.mark.parametrize(("layers", "name"), [(2, "fp32"), (40, "fp32"), (70, "int8")])
def test_models_that_embed_texts_are_kept_whole_up_to_a_billion_parameters(layers: int, name: str) -> None:
    assert default_recipe(of_layers(layers), embeds=True) == name


@pytest.mark.parametrize("number", [0, 64])
@pytest.mark.parametrize("flag", WeightFlags.__struct_fields__)
def test_whoever_says_how_weights_are_stored_gets_no_default_recipe(flag: str, number: int) -> None:
    """The source is never opened, and a number that is refused later has been said too."""
    values = dict.fromkeys(("precision", "head_precision", "scale_type"), "fp16") | {"quantizer": "gptq"}
    assert unasked_recipe(replace(BASE, **{flag: values.get(flag, number)})) is None


INT4 = ExportOptions(source="m", output=Path(), precision="int4")


@pytest.mark.parametrize(
    ("options", "quantizer"),
    [
        (INT4, "gptq"),
        (replace(BASE, precision="fp32", head_precision="int4"), "gptq"),
        (replace(INT4, quantizer="affine"), "affine"),
        (replace(INT4, quantizer="nearest"), "nearest"),
        (replace(BASE, precision="int8"), None),
    ],
)
def test_four_bit_weights_of_small_models_get_error_feedback_unless_told_otherwise(
    options: ExportOptions, quantizer: str | None
) -> None:
    found = with_quantizer(options, of_layers(2))
    assert base_recipe(found).quantizer == quantizer
    assert found.calibration == (BUNDLED_TEXT if quantizer_open(options) else None)
    assert with_quantizer(options, of_layers(40)) == options


def test_a_text_of_ones_own_is_what_error_feedback_measures_on() -> None:
    text = Path("mine.txt")
    assert with_quantizer(replace(INT4, calibration=text), of_layers(2)).calibration == text


@pytest.mark.parametrize("stated", [None, "search"])
def test_rules_for_four_bits_get_error_feedback_too(stated: Quantizer | None) -> None:
    rules = (Rule(("*.up_proj",), precision="int4", quantizer=stated), Rule(("*.v_proj",), block_size=16))
    found = with_quantizer(replace(BASE, precision="int8", rules=rules), of_layers(2))
    assert [rule.quantizer for rule in found.rules] == [stated or "gptq", None]
    assert found.quantizer is None


@pytest.mark.parametrize("name", ["fp32", "int4", "int8"])
def test_recipes_named_as_a_precision_are_its_default(name: str) -> None:
    options = load_recipe(name).options(BASE)
    assert base_recipe(options) == base_recipe(ExportOptions(source="", output=Path(), precision=name))  # type: ignore[arg-type]
    assert options.rules == ()
