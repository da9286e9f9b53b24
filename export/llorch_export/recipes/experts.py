"""Options that mean nothing to a model whose layers have several experts, refused by name."""

from __future__ import annotations

from typing import Final

from llorch_export.formats.targets import TARGETS
from llorch_export.options import ExportOptions
from llorch_serve.artifact.manifest import ExpertsConfig, LlamaConfig
from llorch_serve.errors import UsageError

_WHAT: Final = "this model has several experts in a layer"


def refuse_experts(options: ExportOptions, config: LlamaConfig) -> None:
    """Raise UsageError if the model has experts and an option has no form of them."""
    if not isinstance(config.experts, ExpertsConfig):
        return
    if not TARGETS[options.target].experts:
        able = " or ".join(f"--target {name}" for name, row in TARGETS.items() if row.experts)
        raise UsageError(
            f"{_WHAT}, and --target {options.target} has no operator for them that was compared with the "
            f"reference; choose {able}"
        )
    if options.interop is not None:
        raise UsageError(
            f"{_WHAT}, and --interop {options.interop} is made for models without them; leave it out"
        )
    plain = 0 in config.experts.sparse_layers or config.experts.shared_intermediate_size is not None
    if "smooth" in options.transforms and not plain:
        raise UsageError(
            f"{_WHAT} and no block that every token takes, so that smooth, which evens out the inputs of "
            "such a block's down projection, has no effect; leave it out, or choose --recipe cpu"
        )
