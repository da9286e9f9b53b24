"""Which family a config.json belongs to, and which code of its own it brings.

Input are ``model_type``, ``architectures`` and ``auto_map``; output is a row of the families' table and the
names of files that are left aside. Code of a checkpoint is never run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from llorch_export.config.families import FAMILIES, SUPPORTED_HF
from llorch_export.config.family import Family
from llorch_export.config.fields import MAX_NAME, Fields, quoted, shown
from llorch_export.config.other_families import what_it_has
from llorch_export.config.reference_keys import reference_keys
from llorch_serve.errors import ArtifactError

_MAX_FILES: Final = 32
_CODE: Final = re.compile(r"(?:(?P<repository>[\w.-]+/[\w.-]+)--)?(?P<module>\w+(?:\.\w+)*)\.\w+")
# What else than a language model a class may be, by what its name holds.
_OTHER_HEADS: Final = (
    (re.compile("reward", re.IGNORECASE), "a reward model, which scores texts"),
    (re.compile(r"value_?head", re.IGNORECASE), "a model with a value head, which scores texts"),
    (re.compile("SequenceClassification"), "a model that classifies or scores texts"),
    (re.compile("TokenClassification|QuestionAnswering|MultipleChoice"), "a model that classifies tokens"),
    (re.compile("ConditionalGeneration"), "a model that takes more than text, or an encoder-decoder"),
    (re.compile(r"Model$|Embedding"), "a model without an output layer, for embeddings"),
)

_FOR_EMBEDDINGS: Final = ". For embeddings, say how they are made: --embed last or --embed mean"


def family_of(fields: Fields, origin: str, *, headless: bool = False) -> Family:
    """Return the family that ``model_type`` names.

    headless: the output layer is not wanted, so that a model without one will do.
    Raises ArtifactError if there is none, or if ``architectures`` says that the checkpoint is something else
    than a language model of that family.
    """
    model_type = fields.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = model_type in reference_keys().causal_lms if isinstance(model_type, str) else True
        files = () if known else code_files(fields)
        reasons = [what_it_has(fields)]
        if files:
            reasons.append(
                f"which exists only as code of the checkpoint ({', '.join(files[:4])}), and that is never run"
            )
        elif not known and not reasons[0]:
            reasons.append("of which transformers has no language model")
        why = f", {' and '.join(filter(None, reasons))}" if any(reasons) else ""
        raise ArtifactError(f"{origin}: model_type is {quoted(model_type)}{why}; {SUPPORTED_HF}")
    names = fields.get("architectures")
    if names is None:
        return family
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.wrong("architectures", f"a list of class names such as [{family.causal_lm!r}]")
    if names and not any(
        _spells(name, family) or (headless and _is_headless(name, family)) for name in names
    ):
        _refuse_other_class(names[0], family, origin)
    return family


def has_unknown_class(fields: Fields, family: Family) -> bool:
    """Tell whether ``architectures`` names a language model by a class that transformers does not have."""
    names = fields.get("architectures")
    return (
        isinstance(names, list)
        and bool(names)
        and not any(_spells(name, family) or _is_headless(name, family) for name in names)
    )


def code_files(fields: Fields) -> tuple[str, ...]:
    """Return what ``auto_map`` asks to load code from: each file once, a repository's name before its own.

    An entry that names no file, such as a repository for the tokenizer, is given as it is.
    Raises ArtifactError if it is not a map from classes of transformers to names.
    """
    found: dict[str, None] = {}
    for entry in fields.mapping("auto_map").values():
        for name in entry if isinstance(entry, list) else [entry]:
            if name is None:
                continue
            if not isinstance(name, str) or len(found) >= _MAX_FILES:
                raise fields.wrong(
                    "auto_map", f"up to {_MAX_FILES} classes such as 'modeling_llama.LlamaForCausalLM'"
                )
            match = _CODE.fullmatch(name) if len(name) <= MAX_NAME else None
            if match is None:
                found[shown(name, MAX_NAME)] = None
                continue
            file = match["module"].replace(".", "/") + ".py"
            found[file if match["repository"] is None else f"{match['repository']}/{file}"] = None
    return tuple(found)


def _is_headless(name: str, family: Family) -> bool:
    """Tell whether a class is the family's without its output layer."""
    return name.lower() == f"{family.causal_lm.removesuffix('ForCausalLM')}Model".lower()


def _spells(name: str, family: Family) -> bool:
    """Tell whether a class is the family's; older converters wrote it in other capitals."""
    return name.lower() == family.causal_lm.lower()


def _refuse_other_class(name: str, family: Family, origin: str) -> None:
    """Raise ArtifactError unless ``name`` may be a language model of the family in code of its own."""
    shown = repr(name[:80])
    others: Mapping[str, str] = {cls: kind for kind, cls in reference_keys().causal_lms.items()}
    if name in others:
        raise ArtifactError(
            f"{origin}: architectures names {shown}, expected [{family.causal_lm!r}] for model_type "
            f"{family.architecture}; the class belongs to model_type {others[name]}, so correct the wrong one"
        )
    for pattern, what in _OTHER_HEADS:
        if pattern.search(name):
            embeds = _is_headless(name, family)
            raise ArtifactError(
                f"{origin}: architectures names {shown}: {what}; expected a language model, "
                f"{family.causal_lm}{_FOR_EMBEDDINGS if embeds else ''}"
            )
    if not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ArtifactError(
            f"{origin}: architectures names {shown}, expected [{family.causal_lm!r}] for model_type "
            f"{family.architecture}; {SUPPORTED_HF}"
        )
