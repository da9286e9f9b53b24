"""Settings of the fp8 packing of fbgemm, in which Meta published Llama 3.1 405B."""

from __future__ import annotations

from llorch_export.config.fields import Fields
from llorch_export.config.packed.base import ONE_GROUP, refuse_unasked
from llorch_export.config.packed.compressed import CompressedPacking, CompressedScheme, rounding_notice
from llorch_export.config.packed.patterns import ModulePatterns


def fbgemm_packing(fields: Fields) -> CompressedPacking:
    """Read the settings: fp8 with a scale an output, as compressed-tensors stores it too. Raises
    ArtifactError.
    """
    fields.number("activation_scale_ub", 1200.0, above=0, high=1e30)  # of activations, in its own kernels
    refuse_unasked(fields, ("quant_method", "modules_to_not_convert"))  # seen from the tensors
    scheme = CompressedScheme("float-quantized", floating=True, bits=8, block=(1, ONE_GROUP), symmetric=True)
    every = ModulePatterns(frozenset({"Linear"}))
    notice = rounding_notice("input activations", 8, floating=True)
    return CompressedPacking((notice,), ((every, scheme),), ModulePatterns())
