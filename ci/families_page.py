"""Writes the page of the families from their rows: ``python ci/families_page.py docs/families.md``.

Input: the table of families, what transformers reads for them, and the rows that the tests compare. Output:
one table. ``ci/check`` fails where the committed page differs from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from llorch_export.config.families import FAMILIES  # noqa: E402
from llorch_export.config.family import Family  # noqa: E402
from llorch_export.config.reference_keys import reference_keys  # noqa: E402
from llorch_export.recipes.exact_transforms import why_inexact  # noqa: E402
from support.builders.arch_rows import GGUF, HF  # noqa: E402
from support.builders.checkpoints import of_family, tiny_llama_config  # noqa: E402

_NOTE: Final = "<!-- Written by ci/generate-families from the families' rows. Edit those instead. -->"
_HEAD: Final = f"""# Families

After this page you know how each family that llorch exports differs from Llama, which settings of it are
read, and what its graphs were compared with.

{_NOTE}

<!-- not run: the model is not among the tests' own -->
```console
$ llorch export google/gemma-3-270m --output artifacts/gemma-3
$ llorch verify artifacts/gemma-3 --against google/gemma-3-270m --layers
```

- **settings**: what transformers reads of the family's `config.json` and not of Llama's. Each is honoured, or
  refused by name where it has a value that is not supported.
- **GGUF**: `general.architecture` of files that are read. Their keys of the same meaning are read, and the
  others refused by name.
- **not exact**: transforms of [recipes](recipes.md) that would change such a model, and are refused. The
  default recipe leaves them out.
- **compared**: configurations whose tiny random models were compared with transformers in fp32, logit by
  logit and token by token; of them as a GGUF file.

`ci/compare-llamacpp --families` prints how far these models are from llama.cpp's run of the files that its
own converter makes of them.

| `model_type` | what it has that Llama has not | settings | GGUF | not exact | compared |
|---|---|---|---|---|---|
"""
_PLACES: Final = {
    "before": None,
    "after": "norms behind attention and MLP, none before",
    "around": "norms before and behind attention and MLP",
}
_ACTIVATIONS: Final = {
    "gelu_tanh": "GELU by tanh",
    "gelu": "GELU",
    "relu2": "squared ReLU",
    "silu": "SiLU",
    "xielu": "xIELU",
}
# Families that GGUF files keep under another's name, beside models of that one.
_IN_ANOTHERS_FILES: Final = {
    other for family in FAMILIES.values() for other in (family.with_experts, family.with_windows)
}
_TRANSFORMS: Final = ("rotate", "hadamard", "equalise", "smooth")


def text() -> str:
    """Return the page."""
    return _HEAD + "".join(f"{_row(family)}\n" for family in FAMILIES.values())


def _row(family: Family) -> str:
    name = family.architecture
    keys = reference_keys().keys
    settings = sorted(keys[name] - keys["llama"])
    rows = [row for row, config in HF.items() if config.get("model_type", "llama") == name]
    config = tiny_llama_config(**of_family(name))
    refused = [each for each in _TRANSFORMS if why_inexact(each, config) is not None]
    files = f", {count} as GGUF" if (count := len([row for row in rows if row in GGUF])) else ""
    cells = (
        f"`{name}`",
        "; ".join(_differences(family)) or "nothing",
        ", ".join(f"`{key}`" for key in settings) or "none",
        f"`{family.gguf_name}`" if family.in_gguf or name in _IN_ANOTHERS_FILES else "no",
        ", ".join(refused) or "none",
        f"{len(rows)}{files}",
    )
    return f"| {' | '.join(cells)} |"


def _differences(family: Family) -> Iterator[str]:
    form = family.form
    if (place := _PLACES[form.norm_placement]) is not None:
        yield place
    if form.norm == "layer":
        yield f"norms by mean and variance{', with biases' if form.norm_bias else ''}"
    if family.norm_offset:
        yield "norm weights are stored less one"
    if form.parallel or family.parallel_key:
        where = f" where `{family.parallel_key}` says so" if family.parallel_key else ""
        yield f"attention and MLP side by side{where}"
    activation = next(iter(family.activations.values()))
    if activation != "silu" or not form.gated:
        yield f"{_ACTIVATIONS[activation]}{'' if form.gated else ' without a gate'}"
    if family.qk_norm:
        over = (
            "all query and all key heads together"
            if form.qk_norm_over == "row"
            else "each query and key head"
        )
        yield f"RMS norm of {over}{', after rotation' if form.qk_norm_after_rope else ''}"
    if family.experts is not None:
        shared = ", and a block for every token" if family.experts.shared else ""
        if family.experts.clamped is not None:
            shared += ", with biases and limits"
        yield f"experts that a router chooses{shared}{' (some layers)' if family.experts.some_layers else ''}"
    if form.sinks:
        yield "a learned score in each head that stands for no value"
    yield from _scales(family)
    yield from _positions(family)
    if family.fused:
        yield "fused projections"
    yield from _biases(family)
    if family.reference:
        yield f"not in transformers, whose `{family.reference}` computes the same"


def _scales(family: Family) -> Iterator[str]:
    if family.multipliers:
        yield "embedding, attention, residual and logits multipliers"
    if family.depth_scaled:
        yield "embedding, residual and logits scales"
    if family.scaled_embedding:
        yield "embedding times the root of its size"
    if family.query_scalar is not None:
        yield "scores over the root of a setting"
    if family.logit_scale:
        yield "scaled logits"
    kinds = {"attn_logit_softcapping": "scores", "final_logit_softcapping": "logits"}
    if family.softcaps:
        yield f"soft limits of {' and '.join(kinds[key] for key in family.softcaps)}"


def _positions(family: Family) -> Iterator[str]:
    where = {
        "none": None,
        "all layers": "",
        "all layers if used": "",
        **dict.fromkeys(("by layer", "by turns", "pattern"), " in some layers"),
    }
    if where[family.windows] is not None:
        yield f"sliding window{where[family.windows]}"
    if family.local_theta:
        yield "layers with a window rotate by a base of their own"
    if family.no_rope_interval or family.rotates_in_windows:
        yield "layers without rotary embedding"
    if family.partial_rotary:
        yield "partly rotated heads"
    if family.interleaved:
        yield "rotary pairs are neighbours"
    if family.scales_queries:
        yield "queries scaled by their position, by `llama_4_scaling_beta`"
    if family.alpha:
        yield "a rotary base stretched by `alpha`"


def _biases(family: Family) -> Iterator[str]:
    if family.head_biases:
        yield "biases everywhere"
    elif family.bias_key:
        yield f"biases where `{family.bias_key}` says so"
    elif family.qkv_bias:
        yield "q, k, v biases"
    elif family.architecture == "llama":
        yield "attention and MLP biases, in some"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
