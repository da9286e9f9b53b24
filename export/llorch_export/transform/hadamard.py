"""Values, and the output projection that reads them, in another basis: for each head, v becomes v H.

Attention mixes the values of positions and leaves their channels alone, so its output turns with them: the
value projection becomes H^T W and b H for each key-value head, the output projection W H for each query head.
H is a plain basis (Hadamard's matrix where the size of a head is a power of two), the same for all heads, so
that grouped heads fit.
"""

from __future__ import annotations

from llorch_export.transform.basis import plain_basis
from llorch_export.transform.lazy import LayerNames, Tensors, rotated_columns, rotated_rows
from llorch_serve.artifact.manifest import LlamaConfig

VALUE, OUTPUT = "self_attn.v_proj", "self_attn.o_proj"


def hadamard(config: LlamaConfig, tensors: Tensors) -> Tensors:
    """Return the tensors of the same model with values in another basis. Raises ArtifactError if there is
    none.
    """
    basis = plain_basis(config.head_dim)
    result = dict(tensors)
    for layer in range(config.num_hidden_layers):
        names = LayerNames(layer)
        for name in names.both(VALUE, tensors):
            result[name] = rotated_rows(tensors[name], basis)
        output = names.weight(OUTPUT)
        result[output] = rotated_columns(tensors[output], basis)
    return result
