"""What every reader of packed weights is held to, and how a refusal of one is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.packed_checkpoints import Packed
from support.builders.tiny_exports import all_logits, export_tiny, random_ids
from support.oracles import numpy_llama
from tolerances import QUANTISED_LOGITS_LEVEL_0


def require_values(packed: Packed) -> None:
    """Every tensor is exactly what it was packed from, as a whole and in any range of rows."""
    tensors = open_checkpoint(str(packed.folder)).tensors
    for name, value in packed.values.items():
        np.testing.assert_array_equal(tensors[name].load(), value, err_msg=name)
        np.testing.assert_array_equal(tensors[name].load_rows(3, 13), value[3:13], err_msg=name)


def require_carried(packed: Packed, output: Path) -> None:
    """At precision ``source``, with activations in fp32, logits are those of the values."""
    artifact = export_tiny(packed.folder, output, precision="source", accuracy_level=0)
    ids = random_ids(24)
    expected = numpy_llama.forward(packed.config, packed.values, ids)
    np.testing.assert_allclose(all_logits(artifact, ids), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)


def load_error(packed: Packed, name: str) -> str:
    """Return why a tensor of a changed checkpoint cannot be loaded."""
    packed.rewrite()
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(str(packed.folder)).tensors[name].load()
    return str(caught.value)
