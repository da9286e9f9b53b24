"""Rules find their modules, the last one wins, and a rule without effect is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llorch_export.calibration.measurements import BUNDLED_TEXT
from llorch_export.formats.module import Formats
from llorch_export.options import ExportOptions, Rule
from llorch_export.recipes.base import base_recipe
from llorch_export.recipes.rules import with_rules
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import UsageError
from support.builders.checkpoints import tiny_llama_config

LAYERS = 16


def resolved(
    *rules: Rule, overrides: dict[str, Any] | None = None, base: Recipe | None = None, **options: Any
) -> Recipe:
    config = tiny_llama_config(**({"num_hidden_layers": LAYERS} | (overrides or {})))
    options.setdefault("precision", "int4")
    recipe = base or base_recipe(ExportOptions(source="", output=Path(), rules=rules, **options))
    return with_rules(recipe, rules, config)


def int8(*modules: str, **settings: Any) -> Rule:
    return Rule(modules, precision="int8", label="rule X", **settings)


def modules(recipe: Recipe) -> set[str]:
    return {module for rule in recipe.rules for module in rule.modules}


def test_no_rules_leave_the_recipe_alone() -> None:
    assert resolved() == base_recipe(ExportOptions(source="", output=Path(), precision="int4"))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.layers.3.mlp.down_proj", {"model.layers.3.mlp.down_proj"}),
        ("model.layers.{0,1,15}.*.v_proj", {f"model.layers.{n}.self_attn.v_proj" for n in (0, 1, 15)}),
        (
            "*.self_attn.{q,k}_proj",
            {f"model.layers.{n}.self_attn.{c}_proj" for n in range(LAYERS) for c in "qk"},
        ),
        ("model.layers.?.mlp.up_proj", {f"model.layers.{n}.mlp.up_proj" for n in range(10)}),
        ("model.layers.1[02].mlp.up_proj", {f"model.layers.{n}.mlp.up_proj" for n in (10, 12)}),
    ],
)
def test_patterns(pattern: str, expected: set[str]) -> None:
    assert modules(resolved(int8(pattern))) == expected


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (("first 2",), {0, 1}),
        (("last 2",), {14, 15}),
        (("first 1/8",), {0, 1}),
        (("last 1/8", "every 5"), {4, 9, 14, 15}),
        (("first 1/100",), {0}),
        (("first 9999",), set(range(LAYERS))),
    ],
)
def test_layers_by_number_and_share(layers: tuple[str, ...], expected: set[int]) -> None:
    found = resolved(int8("*.o_proj", layers=layers))
    assert modules(found) == {f"model.layers.{n}.self_attn.o_proj" for n in expected}


def test_the_last_rule_that_matches_wins_as_a_whole() -> None:
    found = resolved(
        int8("*_proj", block_size=16), Rule(("*.o_proj",), precision="fp32"), int8("model.layers.0.*.o_proj")
    )
    form = Formats(found).of
    assert (form("model.layers.1.mlp.up_proj").precision, form("model.layers.1.mlp.up_proj").block_size) == (
        "int8",
        16,
    )
    assert form("model.layers.1.self_attn.o_proj").precision == "fp32"
    assert form("model.layers.0.self_attn.o_proj").block_size == 32  # int8's own, not the first rule's


def test_what_a_rule_leaves_open() -> None:
    found = resolved(
        int8("*.o_proj"),
        Rule(("*.up_proj", "*.v_proj"), quantizer="search"),
        Rule(("lm_head",), precision="int4"),
    )
    form = Formats(found).of
    output = form("model.layers.0.self_attn.o_proj")
    assert (output.block_size, output.quantizer, output.scale_type) == (32, None, "bfloat16")
    assert form("model.layers.0.mlp.up_proj").block_size == 64  # the default's, coarse and fine
    assert form("model.layers.0.self_attn.v_proj").block_size == 32
    assert form("lm_head").quantizer == "affine"
    assert form("lm_head").block_size == 64
    assert form("model.embed_tokens").precision == "int8"


def test_rules_over_fp32_have_their_own_defaults() -> None:
    found = resolved(int8("*.o_proj"), Rule(("*.up_proj",), precision="int4"), precision="fp32")
    form = Formats(found).of
    assert found.accuracy_level == 4
    assert found.kl_limit == base_recipe(ExportOptions(source="", output=Path(), precision="int4")).kl_limit
    assert found.precisions == {"fp32", "int8", "int4"}
    assert (
        form("model.layers.0.self_attn.o_proj").block_size,
        form("model.layers.0.mlp.up_proj").block_size,
    ) == (32, 64)
    assert form("model.layers.0.self_attn.o_proj").scale_type == "float32"
    assert form("model.layers.0.mlp.down_proj").precision == "fp32"


def test_a_rule_that_says_what_holds_anyway_leaves_no_trace() -> None:
    assert resolved(Rule(("*.o_proj",), precision="int4"), int8("*.v_proj")) == resolved(int8("*.v_proj"))


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "{lm_head,model.embed_tokens}"])
def test_a_tied_table_goes_by_either_name(name: str) -> None:
    found = resolved(Rule((name,), precision="int4"), overrides={"tie_word_embeddings": True})
    assert modules(found) == {"model.embed_tokens"}


def test_a_tied_table_has_one_format() -> None:
    rules = (
        Rule(("lm_head",), precision="int4", label="rule A"),
        Rule(("model.embed*",), precision="fp32", label="rule B"),
    )
    with pytest.raises(UsageError, match="rule A and rule B differ on the table"):
        resolved(*rules, overrides={"tie_word_embeddings": True})
    assert {r.precision for r in resolved(*rules).rules} == {"int4", "fp32"}
    rotated = base_recipe(ExportOptions(source="", output=Path(), precision="int4", transforms=("rotate",)))
    found = resolved(
        *rules, overrides={"tie_word_embeddings": True}, base=rotated
    )  # rotation makes two tables
    assert {r.precision for r in found.rules} == {"int4", "fp32"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((int8("*.w_proj"),), r"rule X: no module matches \*\.w_proj"),
        ((int8("model.layers.0.mlp.dwn_proj"),), r"did you mean model\.layers\.0\.mlp\.down_proj\?"),
        ((int8("*.v_proj", "*.input_layernorm"),), r"no module matches \*\.input_layernorm"),
        (
            (int8("lm_head", layers=("first 1",)),),
            "none of the modules it matches lies in the layers first 1",
        ),
        ((int8("*.v_proj", layers=("every 99",)),), "lies in the layers every 99, of 16"),
        ((int8("*", layers=("first 0",)),), "layers has 'first 0', expected 'first 4'"),
        ((int8("*", layers=("every 1/3",)),), "layers has 'every 1/3'"),
        ((int8("*", layers=("1-3",)),), "layers has '1-3'"),
        ((int8("*.o_proj"), Rule(("*",), precision="fp32")), "rule X has no effect: later rules settle"),
        ((int8("{*.o_proj"),), "whose braces are closed"),
        ((int8("{a,{b,c}}"),), "not nested"),
        ((int8("{a,b}" * 10),), "at most 1000 alternatives"),
        ((int8("x" * 501),), "at most 500 characters"),
        (
            (Rule(("*",), precision="source", label="rule X"),),
            "rule X: precision source is for the whole model",
        ),
        (
            (Rule(("*",), precision="fp32", block_size=32, label="rule X"),),
            "rule X: block_size has no effect at precision fp32",
        ),
        (
            (int8("*", quantizer="affine"),),
            "rule X: quantizer affine is for 4 bits, and the rule gives model.embed_tokens 8",
        ),
    ],
)
def test_rules_without_sense_are_refused(rules: tuple[Rule, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolved(*rules)


def test_a_rule_of_8_bits_may_say_error_feedback_or_do_without() -> None:
    (rule,) = resolved(int8("*.down_proj", quantizer="gptq"), quantizer="affine").rules
    assert rule.quantizer == "gptq"
    rules = (int8("*.down_proj", quantizer="nearest"), int8("*.o_proj", block_size=16))
    found = resolved(*rules, precision="int8", quantizer="gptq", calibration=BUNDLED_TEXT)
    assert {(rule.block_size, rule.quantizer) for rule in found.rules} == {(32, None), (16, "gptq")}


def test_rules_do_not_go_with_source() -> None:
    with pytest.raises(UsageError, match="rule X has no effect at precision source"):
        resolved(int8("*"), precision="source")


def test_settings_of_defaults_that_only_rules_could_use_are_refused() -> None:
    with pytest.raises(
        UsageError, match="--block-size 32 has no effect at precision fp32, where only rules quantise"
    ):
        resolved(int8("*.o_proj"), precision="fp32", block_size=32)


def test_an_old_manifest_without_rules_is_read() -> None:
    recipe = resolved()
    old = {k: v for k, v in msgspec.to_builtins(recipe).items() if k != "rules"}
    assert msgspec.convert(old, Recipe) == recipe


def test_outliers_are_modules_with_the_largest_peaks() -> None:
    rule = Rule(("*.mlp.down_proj",), precision="fp32", outliers="1/2", label="the rule")
    peaks = {"model.layers.1.mlp.down_proj": 9.0, "model.layers.0.mlp.down_proj": 3.0}
    config = tiny_llama_config(num_hidden_layers=2)
    recipe = base_recipe(ExportOptions(source="", output=Path(), precision="int8"))
    found = with_rules(recipe, (rule,), config, peaks)
    assert [one.modules for one in found.rules] == [("model.layers.1.mlp.down_proj",)]
    unknown = with_rules(recipe, (rule,), config)  # not measured yet: the first stands for it
    assert [one.modules for one in unknown.rules] == [("model.layers.0.mlp.down_proj",)]
    # A choice may leave an earlier rule what it matches, and is refused for whatever it might take.
    before = Rule(("model.layers.0.mlp.down_proj",), precision="int4", label="the first")
    both = with_rules(recipe, (before, rule), config, peaks)
    assert {rule.precision for rule in both.rules} == {"int4", "fp32"}
    assert with_rules(recipe, (before, rule), config).rules
    after = Rule(("*.down_proj",), precision="int4", label="the last")
    for found_peaks in (None, peaks):
        with pytest.raises(UsageError, match="the rule has no effect: later rules settle every module"):
            with_rules(recipe, (rule, after), config, found_peaks)
        wide = Rule(("*",), activations="row", outliers="1", label="the wide one")
        with pytest.raises(UsageError, match=r"the wide one: .* model.embed_tokens is looked up"):
            with_rules(recipe, (wide,), config, found_peaks)
    for wrong in ("0", "1/0", "half", "-1"):
        with pytest.raises(UsageError, match="expected a number like '6' or a share"):
            with_rules(recipe, (replace(rule, outliers=wrong),), config, peaks)
