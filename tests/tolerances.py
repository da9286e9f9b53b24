"""The one table of tolerances, by precision, with the reason beside each.

Tiny models have logits of magnitude 4 to 5, random weights and 2 layers; "logits" bounds are largest absolute
differences over all positions and the whole vocabulary.
"""

from __future__ import annotations

from typing import Final

FP32_LOGITS: Final = 1e-4
"""fp32 graph against transformers or numpy: same arithmetic, sums in another order (measured: 1e-5 at
most).
"""

SAME_GRAPH_LOGITS: Final = 1e-5
"""One graph and the same weights out of another file format: the rows of q and k only move."""

STEPWISE_LOGITS: Final = 5e-5
"""One graph in other chunks, or step by step: kernels for one row sum in another order (measured: 1.2e-5 at
logits of 8).
"""

WEIGHTS_TOGETHER: Final = 1e-6
"""Sums of exponentials in float32, added in float64, as part of numpy's in float64 (measured: 1e-7)."""

STEPWISE_WEIGHTS: Final = 1e-3
"""The same where logits are as near as :data:`STEPWISE_LOGITS` and temperatures are 0.5 at least: a term is
off by at most four times that, as its logit and the largest are divided by the temperature.
"""

NUMPY_LOGITS: Final = 1e-4
"""transformers in float32 against numpy in float64: what float32 rounding costs (measured: 2e-5)."""

QUANTISED_LOGITS_LEVEL_0: Final = 1e-4
"""Quantised graph at accuracy level 0 against the fp32 forward on dequantised weights: sums in another
order.
"""

MATMUL_RELATIVE_LEVEL_0: Final = 1e-5
"""One MatMulNBits at level 0 against numpy in float64, relative to the largest output."""

MATMUL_STEP_LEVEL_4: Final = 0.5
"""Level 4 rounds activations to int8 with one scale a block and row: each is off by at most half of its
scale.

The error of an output is then at most the sum over blocks of ``0.5 * scale * sum(|w|)``, see the test.
"""

KL_FP32: Final = 1e-6
"""Nats; the limit that ``llorch verify`` sets for fp32. Tiny models measure below 1e-10."""

FP16_LOGITS: Final = 0.04
"""fp16 graph against the float32 forward on float16-rounded weights: activations carry 11 bits (measured:
0.018 at most).
"""

KL_FP16: Final = 5e-6
"""Nats, tiny models, fp16 against the same forward (measured: 1.9e-6 at most)."""

KL_LEVEL_4_INT8: Final = 2e-3
"""Nats, tiny models, int8 weights and level 4 against level 0 of the same weights (measured: 5e-5 to
1e-3).
"""

KL_LEVEL_4_INT4: Final = 2e-3
"""As above with int4 weights: rounding activations costs the same, whatever the weights."""

KL_WIDENED_OFFSETS: Final = 3e-4
"""Nats, tiny models, affine GGUF blocks on their 8-bit grid at level 0: an offset moves by a small part of a
step (measured: 2e-5 to 1.2e-4, the most in Q5_1, whose steps leave room for few sub-steps).
"""

KL_INT8_CACHE: Final = 1e-3
"""Nats, tiny models, int8 weights: keys and values in int8 against float32."""

GATHERED_ROWS: Final = 1e-6
"""GatherBlockQuantized: one product of an integer and a float32 scale, so only the last bit may differ."""

ROTARY_TABLE: Final = 2e-5
"""Cosines at positions below 128 against float64: a float32 angle of 100 is off by 4e-6."""

EXPORT_MEMORY_BYTES: Final = 64 * 2**20
"""Peak growth of an export whatever the size of its tensors: chunks of 8 MiB with their temporaries. Growth
of 27 MiB was measured; one whole tensor of the test's model would exceed it.
"""

EXPORT_LARGE_BYTES: Final = 128 * 2**20
"""Peak growth of an export of a model of real size: what EXPORT_MEMORY_BYTES allows, and the tables of rotary
angles for its context. 40 MiB were measured.
"""

WEIGHTS_MEASURED: Final = 1.1
"""Memory of running an int8 artifact to measure its KV cache, over the size of its weights, which kernels
rearrange.
"""

EXPORT_1B_SECONDS: Final = 60
"""Processor time of an int8 export of 1.2 billion parameters; 15 s were measured."""

KL_ROW_CODES: Final = 5e-6
"""Nats, tiny models in per-channel int8 against numpy's whole numbers: 6e-13 where no code differs; a float32
norm's last bit may move one activation to the next code (measured: 7e-7).
"""

KL_ROW_TINY: Final = 0.005
"""Nats, tiny models, activations rounded by rows against unrounded ones (measured: 1e-4 to 0.0023)."""
KL_HALF_TARGETS: Final = 1e-5
"""Nats, tiny models, graphs of other targets in float16 against float64 (measured: 6e-7 to 9e-7)."""

LOGPROBS: Final = 1e-4
"""Log-probabilities of fp32 graphs against transformers: a logit and the logarithm of a sum, each as exact as
the logits.
"""

HALF_PROVIDER_DIFFERENCE: Final = 0.05
"""Logits of a float16 graph on a GPU and on the CPU, as part of the largest one: sums are taken in other
orders.
"""

KL_REQUANTISED_SOURCE: Final = 5e-3
"""Nats, tiny models, eight-bit floats quantised anew to int8 in small blocks, and level 4 (measured:
1.7e-3).
"""

FOLDED_VALUES: Final = 3e-7
"""Relative: values that the runtime multiplies with their scales when it opens a graph; a scale that is
stored times the step of 8-bit codes is rounded once more, and so is the table over it.
"""

FP32_VECTORS: Final = 1e-6
"""Vectors of length 1 out of an fp32 graph against transformers: no component is above 1."""

INT8_COSINE: Final = 0.999
"""A tiny model's vectors with int8 weights or in float16 (measured: 0.9999)."""

BENCH_AGREEMENT: Final = 0.03
"""Figures of ``llorch bench`` against a stopwatch of the tests', relative: both look at the same calls."""

BENCH_DELAY_MS: Final = 100.0
"""How long a process of a busy machine may wait for its turn between one stopwatch's look and the other's
(measured: 18 ms on two cores that a worker keeps busy).
"""
