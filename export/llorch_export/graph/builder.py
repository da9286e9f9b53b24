"""The pen that all graph modules write with: operators with typed outputs, and weights from the
checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.tape import Tape

from llorch_export.calibration.measurements import Calibration
from llorch_export.checkpoint.base import LazyTensor
from llorch_export.formats.module import Formats, PerChannelActivations
from llorch_export.formats.targets import CONTRIB as CONTRIB  # the graph modules' one import
from llorch_export.formats.targets import TARGETS, Capabilities
from llorch_export.graph.half_precision import COMPUTE_TYPES, WeightCast
from llorch_export.graph.source_forms import SourceForms
from llorch_export.graph.weights import Part, WeightPlan
from llorch_export.quantize.error_factor import ErrorFactors
from llorch_serve.artifact.manifest import LlamaConfig, Recipe

FLOAT = ir.DataType.FLOAT

Attributes = Mapping[str, int | float | str | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of a graph's inputs and outputs; a string is a size that each call chooses.

    rows: logits that are computed. slots, capacity: sequences and positions of the KV cache.
    """

    batch: int | str = "batch"
    tokens: int | str = "tokens"
    rows: int | str = "rows"
    slots: int | str = "slots"
    capacity: int | str = "capacity"

    @property
    def lead(self) -> tuple[int | str, int | str]:
        """The leading dimensions of hidden states."""
        return (self.batch, self.tokens)

    @property
    def positions(self) -> int | str:
        """How many token positions a call has in all."""
        if isinstance(self.batch, int) and isinstance(self.tokens, int):
            return self.batch * self.tokens
        return "positions"


@dataclass(frozen=True, slots=True)
class ActivationCodes:
    """A value in bytes: codes like the value, uint8 around 128; scale [..., 1], or [] if all rows share it,
    float32.
    """

    codes: ir.Value
    scale: ir.Value


class GraphBuilder:
    """State of one graph under construction.

    tensors: the checkpoint's, by Hugging Face name.
    calibration: what was measured on these tensors, where the recipe calls for it.
    error_factors: of the weights' inputs, asked for when a weight with quantizer ``gptq`` is written.
    weight_cast: rounds weights to the recipe's compute type, ``compute``, which outputs of nodes have unless
        said otherwise.
    target: what the runtime can do.
    part: the layers that the graph has, and the plan to add to; None: all of them, and a new one.
    notices: what a person should know of how weights are stored, in the order found.
    activation_codes: of values that have been rounded to bytes in some form, in one part or several, so that
        layers which read the same value share them.
    """

    def __init__(
        self,
        config: LlamaConfig,
        recipe: Recipe,
        tensors: Mapping[str, LazyTensor],
        calibration: Calibration | None = None,
        error_factors: ErrorFactors | None = None,
        *,
        target: Capabilities = TARGETS["cpu"],
        dims: Dimensions = Dimensions(),  # frozen
        part: Part | None = None,
    ) -> None:
        part = Part(WeightPlan()) if part is None else part
        self.layers = range(config.num_hidden_layers) if part.layers is None else part.layers
        self.weights = part.weights
        self.scales_file = part.scales
        self.target = target
        self.dims = dims
        self.config = config
        self.recipe = recipe
        self.formats = Formats(recipe)
        self.tensors = tensors
        self.calibration = calibration
        self.error_factors = error_factors
        self.weight_cast = WeightCast(recipe.compute_type)
        self.compute = self.weight_cast.dtype
        self.tape = Tape()
        self.notices: dict[str, None] = {}
        self.activation_codes: dict[tuple[ir.Value, PerChannelActivations], tuple[ActivationCodes, ...]] = {}
        self._constants: dict[str, ir.Value] = {}
        self._shared: dict[object, ir.Value] = {}

    @functools.cached_property
    def source_forms(self) -> SourceForms:
        """What becomes of each matrix at precision ``source``."""
        return SourceForms(self.tensors, self.target, self.recipe)

    @property
    def hands_on(self) -> bool:
        """Whether other layers come behind those of the graph."""
        return self.layers.stop < self.config.num_hidden_layers

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        name: str,
        shape: Sequence[int | str],
        attributes: Attributes | None = None,
        domain: str = "",
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """Append a node with one output of the given name, type and shape; return the output."""
        return self.multi(
            op_type, inputs, outputs=[(name, shape)], attributes=attributes, domain=domain, dtype=dtype
        )[0]

    def multi(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        outputs: Sequence[tuple[str, Sequence[int | str]]],
        attributes: Attributes | None = None,
        domain: str = "",
        dtype: ir.DataType | None = None,
    ) -> list[ir.Value]:
        """Append a node; an output with an empty name is left out."""
        values = [
            ir.Value(name=name, type=ir.TensorType(dtype or self.compute), shape=ir.Shape(shape))
            if name
            else ir.Value(name="")
            for name, shape in outputs
        ]
        self.tape.op_multi_out(
            op_type,
            inputs,
            dict(attributes or {}),
            outputs=values,
            domain=domain,
            name=f"{values[0].name}/{op_type}",
        )
        return values

    def input(self, name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
        """Return a value that the caller will make an input of the graph."""
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """Add a shape or index; it stays inside the model file, where shape inference can read it."""
        return self.tape.initializer(ir.tensor(array, name=name))

    def shared_constant(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """Return the constant of this name, added at its first use; later uses must mean the same array."""
        if name not in self._constants:
            self._constants[name] = self.constant(name, array)
        return self._constants[name]

    def shared_value(self, key: object, make: Callable[[], ir.Value]) -> ir.Value:
        """Return what ``make`` has given for this key; it is called at the key's first use."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def shared_weight(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """Return the array of this name in the data file, planned at its first use; later uses must mean the
        same.
        """
        dtype = ir.DataType.from_numpy(array.dtype)
        return self.shared_value(
            name, lambda: self.weights.add([(name, dtype, array.shape)], lambda: (array,))[0]
        )

    def vector(self, name: str) -> ir.Value:
        """Plan a checkpoint tensor that is used as it is, in the compute type."""
        tensor = self.tensors[name]
        return self.weights.stream(
            [(name, self.compute, tensor.shape)],
            lambda: ((self.weight_cast.cast(name, chunk),) for chunk in tensor.row_chunks()),
        )[0]

    def narrow_matrix(self, name: str) -> ir.Value:
        """Plan a matrix of the checkpoint in the narrower type that its file has."""
        tensor = self.tensors[name]
        assert tensor.narrow_type is not None
        dtype = COMPUTE_TYPES[tensor.narrow_type]
        return self.weights.stream(
            [(name, dtype, tensor.shape)],
            lambda: ((chunk.astype(dtype.numpy()),) for chunk in tensor.row_chunks()),
        )[0]

    def widened(self, value: ir.Value, *, name: str, shape: Sequence[int | str]) -> ir.Value:
        """Append a cast to the compute type; of a constant the runtime does it once, when it loads the
        graph.
        """
        return self.op("Cast", [value], name=name, shape=shape, attributes={"to": self.compute.value})

    def factor(self, name: str, value: float) -> ir.Value:
        """Add a scalar constant of the compute type."""
        return self.constant(name, np.array(value, np.float32).astype(self.compute.numpy()))

    def shared_factor(self, name: str, value: float) -> ir.Value:
        """Return :meth:`factor` of this name, added at its first use."""
        return self.shared_constant(name, np.array(value, np.float32).astype(self.compute.numpy()))

    def row_chunks(self, names: Sequence[str]) -> Callable[[], Iterator[npt.NDArray[np.float32]]]:
        """Return a reader of several checkpoint tensors, stacked along their first axis, a chunk of rows at a
        time.
        """
        return lambda: (chunk for name in names for chunk in self.tensors[name].row_chunks())

    def rows(self, names: Sequence[str]) -> int:
        """Return the number of rows of the stacked tensors."""
        return sum(self.tensors[name].shape[0] for name in names)
