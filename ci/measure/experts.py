"""What a mixture of experts costs on the CPU, kernel by kernel, against a dense block of the active size.

    ci/measurement experts [EXPERTS ACTIVE HIDDEN INNER]

Each form is first compared with numpy on its own dequantised weights, then timed by turns with the others;
the best turn counts, in time of one processor, which other work hardly changes. The dense block is what one
would have without experts: as wide as all active experts together, so it reads the same bytes for one token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

CONTRIB: Final = "com.microsoft"
ROWS: Final = (1, 8, 64, 512)
TURNS: Final = 5
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """A layer: ``experts``, of which each token takes ``active``; ``inner``: width of one expert."""

    experts: int
    active: int
    hidden: int
    inner: int


@dataclass(frozen=True)
class Stored:
    """A stack of matrices: what a graph holds of it, by name, and the values that it stands for
    [..., N, K].
    """

    parts: dict[str, npt.NDArray[Any]]
    values: Floats


def stored(weights: Floats, bits: int, block: int) -> Stored:
    """Store matrices in symmetric blocks along K; 32 bits: as they are."""
    if bits == 32:
        return Stored({"": weights}, weights)
    *lead, rows, columns = weights.shape
    blocks = weights.reshape(*lead, rows, columns // block, block)
    half = 2 ** (bits - 1)
    scales = (np.abs(blocks).max(axis=-1) / (half - 1)).astype(np.float32)
    codes = (np.round(blocks / scales[..., None]) + half).astype(np.uint8)
    values = ((codes.astype(np.float32) - half) * scales[..., None]).reshape(weights.shape)
    packed = codes.reshape(*lead, rows, columns)
    if bits == 4:
        packed = packed[..., 0::2] | (packed[..., 1::2] << 4)
    return Stored({"": packed, ".scales": scales}, values)


def expected(x: Floats, share: Floats, active: int, up: Floats, down: Floats) -> Floats:
    """Return the weighted sum of the chosen experts, in double precision. up: gate and up rows by turns."""
    result = np.zeros_like(x, dtype=np.float64)
    for row, (token, shares) in enumerate(zip(x, share, strict=True)):
        for expert in np.argsort(-shares, kind="stable")[:active]:
            gate, linear = (up[expert, part::2].astype(np.float64) @ token for part in (0, 1))
            result[row] += shares[expert] * (down[expert] @ (gate / (1 + np.exp(-gate)) * linear))
    return result.astype(np.float32)


class Pen:
    """Collects the nodes and initialisers of a graph over ``x`` [tokens, hidden] and ``share`` [tokens,
    experts].
    """

    def __init__(self, shape: Shape, bits: int, block: int) -> None:
        self.shape, self.bits, self.block = shape, bits, block
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def add(self, op: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], domain=domain, **attributes))
        return output

    def constant(self, name: str, array: npt.NDArray[Any]) -> str:
        self.initializers.append(numpy_helper.from_array(array.copy(), name))
        return name

    def linear(self, x: str, weight: Stored, at: tuple[int, ...], name: str) -> str:
        """Append the product with one matrix of a stack."""
        parts = {key: value[at] for key, value in weight.parts.items()}
        if self.bits == 32:
            return self.add("MatMul", [x, self.constant(f"{name}.w", parts[""].T)], name)
        rows, columns = weight.values[at].shape
        packed = parts[""].reshape(rows, columns // self.block, -1)
        inputs = [x, self.constant(f"{name}.w", packed), self.constant(f"{name}.s", parts[".scales"])]
        sizes = {"K": columns, "N": rows, "bits": self.bits, "block_size": self.block, "accuracy_level": 4}
        return self.add("MatMulNBits", inputs, name, CONTRIB, **sizes)

    def expert(self, x: str, up: Stored, down: Stored, expert: int, name: str) -> str:
        """Append one expert: its gate and up rows lie by turns."""
        gate = self.linear(x, up, (expert, slice(0, None, 2)), f"{name}.gate")
        linear = self.linear(x, up, (expert, slice(1, None, 2)), f"{name}.up")
        silu = self.add("QuickGelu", [gate], f"{name}.silu", CONTRIB, alpha=1.0)
        product = self.add("Mul", [silu, linear], f"{name}.product")
        return self.linear(product, down, (expert,), f"{name}.down")

    def session(self) -> onnxruntime.InferenceSession:
        hidden, experts = self.shape.hidden, self.shape.experts
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", size])
            for name, size in (("x", hidden), ("share", experts))
        ]
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", hidden])
        graph = helper.make_graph(self.nodes, "experts", inputs, [output], self.initializers)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


def operator(pen: Pen, up: Stored, down: Stored) -> None:
    """One node: MoE in fp32, which takes logits, or QMoE in blocks, which takes shares."""
    swiglu = {
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
    }
    weights = {
        f"{name}{key}": pen.constant(f"{name}{key}", value)
        for name, part in (("fc1", up), ("fc2", down))
        for key, value in part.parts.items()
    }
    if pen.bits == 32:
        pen.add("Log", ["share"], "logits")
        inputs = ["x", "logits", weights["fc1"], "", weights["fc2"]]
        pen.add("MoE", inputs, "y", CONTRIB, k=pen.shape.active, **swiglu)
        return
    names = [weights[n] for n in ("fc1", "fc1.scales", "fc2", "fc2.scales")]
    inputs = ["x", "share", *names[:2], "", *names[2:], *[""] * 7, "share"]
    blocks = {"expert_weight_bits": pen.bits, "block_size": pen.block, "accuracy_level": 4}
    pen.add("QMoE", inputs, "y", CONTRIB, k=pen.shape.active, **blocks, **swiglu)


def chosen(pen: Pen) -> str:
    """Append each expert's share of each token, zero where it is not chosen: [tokens, experts]."""
    count = pen.constant("active", np.array([pen.shape.active], np.int64))
    pen.nodes.append(helper.make_node("TopK", ["share", count], ["top", "best"]))
    zeros = pen.add("Mul", ["share", pen.constant("zero", np.zeros((), np.float32))], "zeros")
    return pen.add("ScatterElements", [zeros, "best", "top"], "kept", axis=1)


def masked(pen: Pen, up: Stored, down: Stored) -> None:
    """Every expert for every token, and a factor that is zero for most."""
    chosen(pen)
    columns = [f"share.{expert}" for expert in range(pen.shape.experts)]
    pen.nodes.append(helper.make_node("Split", ["kept"], columns, axis=1, num_outputs=len(columns)))
    parts = [
        pen.add("Mul", [pen.expert("x", up, down, expert, f"e{expert}"), column], f"part.{expert}")
        for expert, column in enumerate(columns)
    ]
    pen.add("Sum", parts, "y")


def gathered(pen: Pen, up: Stored, down: Stored) -> None:
    """For each expert an If around the tokens that chose it, gathered and scattered back."""
    chosen(pen)
    total = pen.add("Mul", ["x", "zero"], "total.0")
    turned = pen.add("Transpose", ["kept"], "turned", perm=[1, 0])
    for expert in range(pen.shape.experts):
        name = f"e{expert}"
        index = pen.constant(f"{name}.index", np.array(expert, np.int64))
        share = pen.add("Gather", [turned, index], f"{name}.share", axis=0)
        rows = pen.add("NonZero", [share], f"{name}.found")
        size = pen.add("Size", [rows], f"{name}.size")
        some = pen.add("Cast", [size], f"{name}.some", to=TensorProto.BOOL)
        inner = Pen(pen.shape, pen.bits, pen.block)
        axes = pen.constant(f"{name}.axes", np.array([1], np.int64))
        flat = pen.constant(f"{name}.flat", np.array([-1], np.int64))
        flat_rows = inner.add("Reshape", [rows, flat], f"{name}.rows")
        picked = inner.add("Gather", ["x", flat_rows], f"{name}.picked", axis=0)
        result = inner.expert(picked, up, down, expert, name)
        factor = inner.add("Gather", [share, flat_rows], f"{name}.factors", axis=0)
        column = inner.add("Unsqueeze", [factor, axes], f"{name}.column")
        scaled = inner.add("Mul", [result, column], f"{name}.scaled")
        places = inner.add("Unsqueeze", [flat_rows, axes], f"{name}.places")
        inner.add("ScatterND", [total, places, scaled], f"{name}.sum", reduction="add")
        pen.initializers += inner.initializers
        kept = helper.make_node("Identity", [total], [f"{name}.kept"])
        then, other = (
            helper.make_graph(nodes, f"{name}.{out}", [], [helper.make_empty_tensor_value_info(out)])
            for nodes, out in ((inner.nodes, f"{name}.sum"), ([kept], f"{name}.kept"))
        )
        last = expert == pen.shape.experts - 1
        total = pen.add(
            "If", [some], "y" if last else f"total.{expert + 1}", then_branch=then, else_branch=other
        )


def dense(pen: Pen, up: Stored, down: Stored) -> None:
    """One block as wide as all active experts together, with the first experts' weights."""
    active = pen.shape.active
    wide_up = Stored(
        {k: v[:active].reshape(1, -1, *v.shape[2:]) for k, v in up.parts.items()},
        up.values[:active].reshape(1, -1, pen.shape.hidden),
    )
    wide_down = Stored(
        {k: np.moveaxis(v[:active], 0, 1).reshape(1, pen.shape.hidden, -1) for k, v in down.parts.items()},
        np.moveaxis(down.values[:active], 0, 1).reshape(1, pen.shape.hidden, -1),
    )
    pen.add("Identity", [pen.expert("x", wide_up, wide_down, 0, "dense")], "y")


FORMS: Final[dict[str, Callable[[Pen, Stored, Stored], None]]] = {
    "operator": operator,
    "masked": masked,
    "gathered": gathered,
    "dense": dense,
}


def measure(shape: Shape, bits: int, block: int) -> None:
    """Print how far each form is from numpy, and its time for each number of rows."""
    rng = np.random.default_rng(0)

    def draw(rows: int, columns: int) -> Floats:
        drawn = rng.standard_normal((shape.experts, rows, columns), np.float32)
        return drawn / np.float32(np.sqrt(columns))

    up = stored(draw(2 * shape.inner, shape.hidden), bits, block)
    down = stored(draw(shape.hidden, shape.inner), bits, block)
    sessions = {}
    for name, write in FORMS.items():
        pen = Pen(shape, bits, block)
        write(pen, up, down)
        sessions[name] = pen.session()
    for rows in ROWS:
        x = rng.standard_normal((rows, shape.hidden), np.float32)
        logits = np.exp(rng.standard_normal((rows, shape.experts), np.float32))
        feeds = {"x": x, "share": logits / logits.sum(axis=1, keepdims=True)}
        wanted = expected(x, feeds["share"], shape.active, up.values, down.values) if rows <= 64 else None
        cells = []
        times: dict[str, list[float]] = {name: [] for name in FORMS}
        outputs: dict[str, list[Floats]] = {name: [] for name in FORMS}
        for _ in range(TURNS):
            for name, session in sessions.items():
                given = {i.name: feeds[i.name] for i in session.get_inputs() if i.name in feeds}
                repeats = max(2, 16 // rows)
                began = time.process_time()
                for _ in range(repeats):
                    (found,) = session.run(None, given)
                times[name].append((time.process_time() - began) / repeats)
                outputs[name].append(found)
        base = min(times["dense"])
        for name, spent in times.items():
            cost = min(spent)
            far = ""
            if name != "dense" and wanted is not None:
                error = np.sqrt(np.square(outputs[name][0] - wanted).mean()) / wanted.std()
                changes = max(float(np.abs(other - outputs[name][0]).max()) for other in outputs[name])
                far = f", error {error:.1e}, changes {changes:.0e}"
            cells.append(f"{name} {1e6 * cost:.0f} us ({base / cost:.2f} of dense{far})")
        print(f"{bits} bits, block {block}, {rows} rows: " + "; ".join(cells), flush=True)  # noqa: T201 - a script's output


def main(arguments: list[str]) -> None:
    """Measure one shape, of Mixtral's proportions if none is given."""
    shape = Shape(*map(int, arguments)) if arguments else Shape(8, 2, 1024, 3584)
    for bits, block in ((8, 32), (8, 64), (4, 64), (32, 1)):
        measure(shape, bits, block)


if __name__ == "__main__":
    main(sys.argv[1:])
