"""``--activations`` at the front door: artifacts that run, are shown and measured, and what is refused in one
line.
"""

from __future__ import annotations

import pytest

from support.harness.processes import llorch_here

FORMS = {
    "row": ("--activations", "row"),
    "static": ("--activations", "static", "--transform", "rotate"),
}


@pytest.fixture(scope="module", params=FORMS)
def made(request, tiny_source, tmp_path_factory, export_here):
    """The form, and an artifact of it."""
    folder = tmp_path_factory.mktemp(request.param) / "artifact"
    return request.param, export_here(tiny_source, folder, *FORMS[request.param])


def test_it_generates_and_is_shown(made):
    form, folder = made
    answer = llorch_here(
        "generate", folder, "--prompt-ids", "5,9,300", "--max-tokens", "4", "--json"
    ).document()
    assert len(answer["token_ids"]) == 4
    found = llorch_here("inspect", folder, "--json").document()
    assert found["recipe"]["activations"] == form
    assert found["target"] == "cpu"
    stored = {module["name"]: module for module in found["graph"]["modules"]}
    gate = stored["model.layers.0.mlp.gate_proj"]
    # A float32 scale for each output, of 64 inputs.
    assert (gate["precision"], gate["block_size"], gate["bits_per_weight"]) == ("int8", None, 8.5)
    assert stored["model.layers.0.mlp.down_proj"]["block_size"] == (None if form == "row" else 32)
    weights = found["graph"]["weight_bytes"]
    assert weights["linear"] == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    assert weights["constants"] < 512
    assert f"activations {form}" in llorch_here("inspect", folder).stdout


@pytest.mark.reference
def test_it_is_verified_whole_and_layer_by_layer(made, tiny_source):
    _, folder = made
    whole = llorch_here("verify", folder, "--against", tiny_source, "--json").document()
    assert whole["passed"]
    assert 0 < whole["kl"] < whole["limit"] == 0.06
    layers = llorch_here("verify", folder, "--against", tiny_source, "--layers", "--json").document()
    assert layers["passed"], layers["first_departing"]
    names = {stage["name"] for stage in layers["stages"]}
    assert {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"} <= names


@pytest.mark.reference
def test_recipes_with_it_are_measured_beside_others(tiny_source, tmp_path):
    rows, mixed = tmp_path / "rows.toml", tmp_path / "mixed.toml"
    rows.write_text('[defaults]\nprecision = "int8"\nactivations = "row"\n')
    mixed.write_text(rows.read_text() + '[[rule]]\nmodules = "*.down_proj"\nactivations = "block"\n')
    flags = ("--recipe", "int8", "--recipe", rows, "--recipe", mixed)
    points = llorch_here("frontier", tiny_source, *flags, "--json").document()["points"]
    kl = {point["label"]: point["kl"] for point in points}
    assert 0 < kl["int8"] < kl["rows"] < 0.06
    assert kl["int8"] < kl["mixed"] < 0.06
    assert [point["label"] for point in points] == ["rows", "mixed", "int8"]  # by bits per weight


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target", "cuda", "--activations", "row"), "--activations row with --target cuda: "),
        (("--activations", "static"), "--activations static without a rotation"),
        (("--activations", "row", "--compute-type", "float16"), "--activations row with float16: "),
        (("--activations", "row", "--precision", "int4"), "which takes --precision int8 and not int4"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_what_cannot_be_is_refused_before_the_source_is_looked_at(tmp_path, flags, message, dry):
    outcome = llorch_here("export", tmp_path / "none.gguf", "--output", tmp_path / "out", *flags, *dry)
    assert outcome.code == 2
    assert message in outcome.error()


def test_a_recipe_file_is_refused_by_its_rule(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[[rule]]\nmodules = "*.down_proj"\nactivations = "row"\n')
    flags = ("--output", tmp_path / "out", "--recipe", recipe, "--target", "openvino")
    outcome = llorch_here("export", tmp_path / "none.gguf", *flags)
    assert outcome.code == 2
    assert f"recipe {recipe}, rule 1: activations row with --target openvino: " in outcome.error()
