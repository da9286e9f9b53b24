"""GGUF blocks in MatMulNBits' layout stand for the weights that the gguf package reads from them."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.checkpoint.gguf import SUPPORTED_TYPES
from llorch_export.checkpoint.stream import FLOAT_CODECS
from llorch_export.quantize.affine import widen
from llorch_export.quantize.repack import REPACKED_TYPES, BlockForm, carried_form, common_form, repack
from support.oracles.gguf_blocks import AFFINE, INTEGER, SYMMETRIC, block_size, dequantised, random_blocks
from support.oracles.quantised_numpy import unpack

Floats = npt.NDArray[np.float32]
ALL_WIDTHS = (2, 4, 8)
TYPES = (*SYMMETRIC, *AFFINE, *INTEGER)


def weights_of(kind: str, data: npt.NDArray[np.uint8], form: BlockForm) -> Floats:
    """Return what the graph's operators make of the repacked blocks."""
    packed, scales, zero_points = repack(kind, data, form)
    assert packed.dtype == zero_points.dtype == np.uint8
    assert packed.shape == (*scales.shape, form.block_size * form.bits // 8)
    if not form.zero_points:
        assert (zero_points == 2 ** (form.bits - 1)).all()
    steps = (unpack(packed, form.bits) - zero_points[..., None].astype(np.int64)).astype(np.float32)
    return (steps * scales[..., None]).reshape(len(data), -1)


def test_every_quantised_type_that_is_read_is_carried_over() -> None:
    assert set(REPACKED_TYPES) == set(SUPPORTED_TYPES) - set(FLOAT_CODECS) == set(TYPES)


@pytest.mark.parametrize("kind", [*SYMMETRIC, *INTEGER])
def test_types_without_an_offset_are_exact(kind: str) -> None:
    data = random_blocks(kind, 24, 512, seed=1, spread=2.0)  # scales of either sign
    form = common_form([kind], ALL_WIDTHS)
    np.testing.assert_array_equal(weights_of(kind, data, form), dequantised(kind, data))


@pytest.mark.parametrize(
    ("kind", "bits", "block_size"),
    [
        ("Q4_0", 4, 32),
        ("Q8_0", 8, 32),
        ("Q6_K", 8, 16),
        ("Q3_K", 4, 16),
        ("Q1_0", 2, 64),
        ("TQ1_0", 2, 64),
        ("IQ4_XS", 8, 32),
    ],
)
def test_types_without_an_offset_need_no_zero_points(kind: str, bits: int, block_size: int) -> None:
    assert common_form([kind], ALL_WIDTHS) == BlockForm(bits, block_size, zero_points=False)


@pytest.mark.parametrize("kind", ["Q2_0", "TQ2_0"])
def test_pairs_of_bits_for_minus_one_to_two_have_their_zero_point(kind: str) -> None:
    assert common_form([kind], ALL_WIDTHS) == BlockForm(2, 64, zero_points=True)
    assert carried_form(kind, ALL_WIDTHS) == "2 bits, block 64, exactly"
    assert carried_form(kind) == "4 bits, block 32, exactly"


@pytest.mark.parametrize("kind", ["Q1_0", "TQ1_0", "Q2_0", "TQ2_0"])
def test_types_of_two_bits_are_widened_where_no_operator_has_them_or_others_share_the_matrix(
    kind: str,
) -> None:
    zero_points = kind in ("Q2_0", "TQ2_0")
    assert common_form([kind]) == BlockForm(4, 32, zero_points)
    assert common_form([kind, "Q6_K"], ALL_WIDTHS) == BlockForm(8, 16, zero_points)
    assert common_form([kind, "Q4_1"], ALL_WIDTHS) == BlockForm(8, 32, zero_points=True)
    data = random_blocks(kind, 24, 512, seed=1, spread=2.0)
    for form in (common_form([kind]), common_form([kind, "Q6_K"])):
        np.testing.assert_array_equal(weights_of(kind, data, form), dequantised(kind, data))


@pytest.mark.parametrize(("kind", "finest", "typical"), [("Q4_1", 17, 2.2e-3), ("Q5_1", 8, 3.2e-3)])
def test_offsets_inside_a_blocks_range_move_by_half_a_sub_step_at_most(
    kind: str, finest: int, typical: float
) -> None:
    weights = np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32)
    data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
    expected = dequantised(kind, data)
    error = np.abs(weights_of(kind, data, common_form([kind])) - expected).reshape(-1, 32)
    _, size = block_size(kind)
    steps = data.reshape(-1, size)[:, :2].copy().view("<f2").astype(np.float32)
    assert (error <= np.abs(steps) / (2 * finest) * (1 + 1e-3)).all()
    # One shift for a whole block, so that differences inside it are the file's.
    assert (np.ptp(error, axis=1) <= 1e-6).all()
    assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < typical


@pytest.mark.parametrize("kind", AFFINE)
def test_affine_blocks_of_any_bytes_are_within_three_thousandths(kind: str) -> None:
    data = random_blocks(kind, 64, 512, seed=3)
    expected = dequantised(kind, data)
    error = weights_of(kind, data, common_form([kind])) - expected
    assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 3e-3


@pytest.mark.parametrize("kind", TYPES)
def test_two_types_share_a_form_without_changing_a_weight(kind: str) -> None:
    data = random_blocks(kind, 8, 256, seed=4)
    alone = weights_of(kind, data, common_form([kind]))
    for form in {common_form([kind, other]) for other in TYPES}:
        np.testing.assert_array_equal(weights_of(kind, data, form), alone)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_do_not_depend_on_each_other(kind: str) -> None:
    data, form = random_blocks(kind, 6, 256, seed=5), common_form([kind])
    np.testing.assert_array_equal(weights_of(kind, data, form)[2:4], weights_of(kind, data[2:4], form))


@pytest.mark.parametrize("kind", sorted({*TYPES} - {"IQ1_M", "MXFP4", "NVFP4"}))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_stays_so(kind: str, bad: float) -> None:
    data = random_blocks(kind, 4, 256, seed=6)
    place = {"Q6_K": 208, "Q2_K": 80, "Q3_K": 108, "TQ1_0": 52, "TQ2_0": 64}.get(kind, 0)
    data[2, place : place + 2] = np.array([bad], "<f2").view(np.uint8)
    _, scales, _ = repack(kind, data, common_form([kind]))
    assert not np.isfinite(scales[2]).all()
    assert np.isfinite(scales[[0, 1, 3]]).all()


def test_weights_beyond_float32_give_a_scale_that_is_not_finite() -> None:
    data = random_blocks("MXFP4", 2, 64, seed=7)
    data[1, 0] = 255  # 2 ** 127, of which the table holds up to the twelvefold
    _, scales, _ = repack("MXFP4", data, common_form(["MXFP4"]))
    assert not np.isfinite(scales[1, 0])
    assert np.isfinite(scales[0]).all()


@pytest.mark.parametrize("kind", INTEGER)
def test_blocks_of_any_bytes_are_carried_as_they_are_read(kind: str) -> None:
    _, size = block_size(kind)
    data = np.random.default_rng(8).integers(0, 256, (512, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantised(kind, data)
    _, scales, _ = repack(kind, data, common_form([kind]))
    whole = np.isfinite(expected.reshape(*scales.shape, -1)).all(axis=2)
    np.testing.assert_array_equal(np.isfinite(scales), whole)
    sane = whole.all(axis=1)
    assert sane.sum() > 100
    np.testing.assert_array_equal(weights_of(kind, data[sane], common_form([kind])), expected[sane])


def test_zero_scales_give_zeros() -> None:
    data = np.zeros((4, 18), np.uint8)
    assert not weights_of("IQ4_NL", data, common_form(["IQ4_NL"])).any()


@pytest.mark.parametrize(
    ("kind", "said"),
    [("Q3_K", "4 bits, block 16, exactly"), ("Q2_K", "8 bits, block 16, offsets rounded to part of a step")],
)
def test_the_form_of_a_type_is_said_in_words(kind: str, said: str) -> None:
    assert carried_form(kind) == said


def widened(codes: list[int], step: float, offset: float) -> tuple[Floats, Floats]:
    """Return the weights of one block before and after."""
    given = np.array([codes], np.uint8)
    wide, scales, zeros = widen(given, np.array([step], np.float32), np.array([offset], np.float32))
    expected = np.float32(step) * given[0].astype(np.float32) + np.float32(offset)
    return expected, scales * (wide[0].astype(np.float32) - zeros.astype(np.float32))


@pytest.mark.parametrize(
    ("codes", "step", "offset"),
    [
        ([0, 15, 7], 0.5, -4.0),  # a whole number of steps
        ([0, 15, 7], 0.5, -0.125),  # a quarter of one
        ([0, 15, 7], -0.5, 4.0),
        ([0, 31, 7], 1.0, -15.5),
        ([0, 0, 0], 0.5, -3.7),  # one value
        ([9, 9, 9], 0.1, 3.7),
        ([0, 15, 3], 0.0, -0.3),  # no step
        ([0, 15, 3], 0.0, 0.0),
        ([0, 15, 3], 1.0, 100.0),  # zero is far outside
        ([0, 15, 3], 1.0, -255.0),
    ],
)
def test_offsets_that_fit_are_exact(codes: list[int], step: float, offset: float) -> None:
    expected, found = widened(codes, step, offset)
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("offset", [-5000.0, -256.0, 241.0, 1e6])
def test_blocks_beyond_eight_bits_are_rounded_to_the_nearest_level(offset: float) -> None:
    expected, found = widened([0, 15, 3], 1.0, offset)
    assert np.abs(found - expected).max() <= np.abs(expected).max() / 255 / 2 * 1.001


@pytest.mark.parametrize("ratio", [-20.0, -15.0, -7.3, -0.01, 0.01, 4.4, 60.0, 200.0])
def test_the_bound_follows_the_blocks_span(ratio: float) -> None:
    expected, found = widened([0, 15, 3], 0.25, 0.25 * ratio)
    span = max(15 + ratio, 0) - min(ratio, 0)
    bound = 0.25 / (2 * min(17, int(255 / span)))
    assert np.abs(found - expected).max() <= bound * (1 + 1e-4) + 1e-5
