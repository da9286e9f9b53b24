"""Comparing stages: distances by definition, tolerances by recipe, and which reference value a name stands
for.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from llorch_export.options import ExportOptions
from llorch_export.recipes.base import base_recipe
from llorch_export.verify.layers.graph import AttentionNode, GraphRun, layer_of
from llorch_export.verify.layers.matching import counterpart, pairs, rotate, unmatched
from llorch_export.verify.layers.reference import AttentionTrace, ReferenceRun
from llorch_export.verify.layers.stages import Kind, Measure, compare, judged, tolerance
from llorch_export.verify.layers.verify import other_choices
from llorch_serve.artifact.manifest import Recipe


def recipe(precision: str) -> Recipe:
    return base_recipe(ExportOptions(source="", output=None, precision=precision))  # type: ignore[arg-type]


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(Kind.NORM, 1e-5), (Kind.FINAL_NORM, 1e-5), (Kind.ROPE, 1e-5), (Kind.QKV, 1e-4), (Kind.BLOCK, 1e-4)],
)
def test_fp32_is_scaled_by_the_position(kind: Kind, limit: float) -> None:
    """A position of huge values does not excuse one of small values."""
    assert tolerance(kind, recipe("fp32")).limit == limit
    reference = np.array([[8000.0, 1.0], [0.5, 0.25]], np.float32)
    for row, allowance in ((0, 8000 * limit), (1, limit)):
        for factor, passed in ((0.9, True), (1.1, False)):
            found = reference.copy()
            found[row, 1] += np.float32(factor * allowance)
            stage = compare("x", kind, 0, "observed", reference, found, recipe("fp32"))
            assert (stage.measure, stage.passed) == (Measure.SCALED, passed)
            assert stage.distance == pytest.approx(factor * limit, rel=0.01)


def test_logits_of_fp32_are_compared_as_they_are() -> None:
    reference = np.full((2, 3), 50, np.float32)
    for difference, passed in ((9e-4, True), (1.1e-3, False)):
        stage = compare(
            "logits",
            Kind.LOGITS,
            None,
            "observed",
            reference,
            reference + np.float32(difference),
            recipe("fp32"),
        )
        assert (stage.measure, stage.limit, stage.passed) == (Measure.ABSOLUTE, 1e-3, passed)


@pytest.mark.parametrize(
    ("precision", "limit"), [("fp16", 0.02), ("bf16", 0.2), ("int8", 0.2), ("int4", 1.0)]
)
def test_quantised_recipes_are_held_to_a_share_of_the_reference(precision: str, limit: float) -> None:
    reference = array(4, 8)
    for share, passed in ((0.95 * limit, True), (1.05 * limit, False)):
        found = reference * np.float32(1 + share)
        stage = compare("x", Kind.NORM, 0, "observed", reference, found, recipe(precision))
        assert (stage.measure, stage.passed) == (Measure.RELATIVE, passed)
        assert stage.distance == pytest.approx(share, rel=1e-3)
        assert stage.cosine == pytest.approx(1)  # a wrong scale is no wrong direction, and yet is seen


def test_cosine_of_a_right_angle_and_of_nothing() -> None:
    x, y, zero = (np.array([v], np.float32) for v in ([1, 0], [0, 1], [0, 0]))
    for a, b, expected in ((x, y, 0.0), (x, -x, -1.0), (zero, zero, 1.0), (x, zero, 0.0)):
        assert compare("x", Kind.QKV, 0, "observed", a, b, recipe("fp32")).cosine == expected


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_nan_never_passes(precision: str) -> None:
    found = array(2, 4)
    found[1, 1] = np.nan
    assert not compare("x", Kind.QKV, 0, "observed", array(2, 4), found, recipe(precision)).passed


def test_greedy_tokens_are_judged_in_fp32_only() -> None:
    for precision, passed in (("fp32", False), ("int8", True), ("int4", True)):
        allowed = tolerance(Kind.GREEDY, recipe(precision))
        assert judged("greedy", Kind.GREEDY, None, "observed", allowed, 1).passed is passed


def test_softmax_is_held_to_the_recipes_own_limit() -> None:
    other = msgspec.structs.replace(recipe("int8"), kl_limit=0.123)
    assert tolerance(Kind.SOFTMAX, other).limit == 0.123


def test_other_choices_leaves_ties_alone() -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[:, 1] = 5
    logits[1, 2] = 4.9995  # a tie within rounding
    logits[2, 2] = 4.99
    assert other_choices(logits, [1, 2, 2]) == 1
    assert other_choices(logits, [0, 1, 1]) == 1


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    x, angles = array(3, 5, 8), array(9, 3, seed=1)
    found = rotate(x, np.cos(angles), np.sin(angles))
    turned = (x[..., :3] + 1j * x[..., 3:6]) * np.exp(1j * angles[:5])
    np.testing.assert_allclose(found[..., :6], np.concatenate([turned.real, turned.imag], -1), atol=1e-6)
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])  # the part that is not rotated


def test_layer_of_a_name() -> None:
    assert [layer_of(n) for n in ("model.layers.12.mlp.silu", "model.norm", "embedding")] == [12, None, None]


def test_every_suffix_has_its_counterpart() -> None:
    p = "model.layers.0"
    parts = {f"{p}.self_attn.{c}_proj": array(5, 4, seed=i) for i, c in enumerate("qkv")}
    run = ReferenceRun(
        inputs={f"{p}.mlp.down_proj": array(5, 6), f"{p}.post_attention_layernorm": array(5, 3)},
        outputs=parts
        | {
            "model.embed_tokens": array(5, 8, seed=5),
            f"{p}.mlp.act_fn": array(5, 6, seed=6),
            f"{p}.mlp.gate_up_proj": array(5, 12, seed=7),
            f"{p}.self_attn.k_norm": array(5, 2, 4, seed=8),
        },
    )
    expected = {
        f"{p}.self_attn.k_proj": parts[f"{p}.self_attn.k_proj"],
        f"{p}.self_attn.qkv_proj": np.concatenate(list(parts.values()), -1),
        f"{p}.self_attn.k_norm": run.outputs[f"{p}.self_attn.k_norm"],
        "embedding": run.outputs["model.embed_tokens"],
        f"{p}.post_attention_layernorm/residual": run.inputs[f"{p}.post_attention_layernorm"],
        f"{p}.mlp.gate_proj": run.outputs[f"{p}.mlp.gate_up_proj"][:, :6],
        f"{p}.mlp.up_proj": run.outputs[f"{p}.mlp.gate_up_proj"][:, 6:],
        f"{p}.mlp.silu": run.outputs[f"{p}.mlp.act_fn"],
        f"{p}.mlp.product": run.inputs[f"{p}.mlp.down_proj"],
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(counterpart(name, run), value, err_msg=name)
    for name in (
        "wanted.heads",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.mlp.product",
        "x/residual",
    ):
        assert counterpart(name, run) is None


def test_stages_follow_the_graph_and_say_what_has_no_counterpart() -> None:
    """A layer that does not rotate, and a value that the reference does not know."""
    node = AttentionNode(
        0,
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.heads",
        "k",
        "v",
        "s",
        None,
        num_heads=2,
    )
    packed, key, value = array(1, 3, 16), array(1, 1, 3, 4, seed=1), array(1, 1, 3, 4, seed=2)
    scores, heads = array(1, 2, 3, 3, seed=3), array(1, 3, 8, seed=4)
    values = {"embedding": array(1, 3, 5), "odd": array(1), node.query: packed, node.heads: heads}
    graph = GraphRun(values | {"k": key, "v": value, "s": scores, "logits": array(3, 9)}, [node], {})
    query = packed[0, :, :8].reshape(3, 2, 4).swapaxes(0, 1)
    seen = np.tril(np.ones((3, 3), bool))
    run = ReferenceRun(
        inputs={"model.layers.0.self_attn.o_proj": heads[0]},
        outputs={"model.embed_tokens": values["embedding"][0]},
        attention={0: AttentionTrace(query, key[0], value[0], scores[0] + np.where(seen, 0, 9), seen)},
    )
    found = list(pairs(graph, run, head_dim=4))
    assert [(name, kind, layer, source) for name, kind, layer, source, _, _ in found] == [
        ("embedding", Kind.EMBEDDING, None, "observed"),
        ("k", Kind.ROPE, 0, "observed"),
        (f"{node.heads}/query", Kind.ROPE, 0, "observed"),
        ("v", Kind.QKV, 0, "observed"),
        ("s", Kind.SCORES, 0, "observed"),
        (node.heads, Kind.ATTENTION, 0, "observed"),
    ]
    for name, *_, expected, value_ in found:
        np.testing.assert_array_equal(expected, value_, err_msg=name)
    assert unmatched(graph, {name for name, *_ in found}) == ("odd", node.query)
