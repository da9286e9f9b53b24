"""Which transforms of the weights leave a model as it was, by how its layers are built."""

from __future__ import annotations

from llorch_serve.artifact.manifest import LlamaConfig, TransformName
from llorch_serve.errors import UsageError


def refuse_inexact(transforms: tuple[TransformName, ...], config: LlamaConfig) -> None:
    """Raise UsageError for a transform that would change the model of ``config``."""
    for transform in transforms:
        why = why_inexact(transform, config)
        if why is not None:
            raise UsageError(
                f"the transform {transform} would change a model of type {config.architecture}: {why}. Leave "
                "it out, as --recipe int8 does"
            )


def why_inexact(transform: TransformName, config: LlamaConfig) -> str | None:
    """Return why a transform is not exact for the model; None if it is."""
    form = config.form
    if transform == "rotate":
        # A norm's weight commutes with a rotation only where a matrix behind it can take it in.
        if form.norm_placement != "before":
            return "its norms behind attention and MLP scale channels of the residual stream by themselves"
        if form.norm != "rms":
            return "its norms subtract the mean over channels, which a rotation does not keep"
    if transform == "smooth" and not form.gated:
        return "its MLP has the activation between the two matrices that would share a scale"
    return None
