"""Which keys of a config.json transformers reads to compute a family's logits, found in its source.

Writes ``export/llorch_export/config/reference_keys.json``. Nothing of transformers is
imported or run: from the family's causal language model on, every class and function that it names is read as
a syntax tree, and each read of a config is noted: ``config.KEY``, ``getattr(config, "KEY")``,
``kwargs.pop("KEY")`` in the config's own class, ``rope_parameters["KEY"]``.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from llorch_export.config.families import FAMILIES
from llorch_export.config.family import Family

# Modules of transformers beside a family's own that a computation may lead into.
_FOLLOWED: Final = frozenset(
    {
        "cache_utils",
        "masking_utils",
        "modeling_rope_utils",
        "modeling_utils",
    }
)
# What a config is called where it is read.
_CONFIGS: Final = frozenset({"config", "layer_config", "decoder_config", "effective_config", "text_config"})
_ROPE: Final = frozenset({"rope_parameters", "rope_parameters_dict"})
# Methods that do not lead to logits: drawing new weights, storing, and what only training does.
_OTHER_METHODS: Final = frozenset(
    {
        "_init_weights",
        "enable_input_require_grads",
        "estimate_tokens",
        "gradient_checkpointing_enable",
        "resize_token_embeddings",
        "save_pretrained",
        "to_dict",
        "to_diff_dict",
        "validate_token_ids",
        "warn_if_padding_and_no_attention_mask",
    }
)
# What runs when a config is built from a file, beside every check called validate_...
_BUILDING: Final = frozenset({"__post_init__", "convert_rope_params_to_dict", "standardize_rope_params"})
_BASES: Final = (
    ("configuration_utils", "PreTrainedConfig"),
    ("modeling_rope_utils", "RotaryEmbeddingConfigMixin"),
)
# Methods of a config that stand for a key which a file may have.
_PROPERTIES_OF_FILES: Final = frozenset({"per_layer_config", "rope_scaling"})
# Dropout happens while training only; every family has its own names for it.
_DROPOUT: Final = ("dropout", "pdrop")
# What families that transformers lacks call the keys of those by which it computes the same; "": nothing.
_OTHER_NAMES: Final = {
    "minicpm": {
        "embedding_multiplier": "scale_emb",
        "residual_multiplier": "scale_depth",
        "logits_scaling": "dim_model_base",
        "attention_multiplier": "",
    }
}
# Keys that are read on the way and leave logits at inference as they are, each with the reason.
_WITHOUT_EFFECT: Final = {
    "gradient_checkpointing": "memory while training",
    "chunk_size_feed_forward": "slices of the same product",
    "distributed_config": "over which devices a model is spread",
    "dtype": "the type that weights are loaded in; the reference is float32",
    "torch_dtype": "the same by its old name",
    "pad_token_id": "a row of the embedding that gets no gradient",
    "bos_token_id": "generation, not logits",
    "eos_token_id": "generation, not logits",
    "sep_token_id": "generation, not logits",
    "id2label": "heads for classification",
    "num_labels": "heads for classification",
    "problem_type": "heads for classification",
    "name_or_path": "where a model was loaded from",
    "architectures": "which class was stored; models are built by model_type",
    "model_type": "which family this is, said before",
    "transformers_version": "what wrote the file",
    "use_cache": "whether keys and values are kept, not what they are",
    "output_attentions": "what is returned beside logits",
    "output_hidden_states": "what is returned beside logits",
    "return_dict": "how the answer is wrapped",
    "embed_dim": "an old name of the width, in a check that heads divide it",
    "num_heads": "an old name of the heads, in the same check",
    "attn_implementation": "the kernel",
    "experts_implementation": "the kernel",
    "output_router_logits": "what is returned beside logits",
    "router_aux_loss_coef": "a loss while training",
    "router_jitter_noise": "noise while training",
}


def table() -> dict[str, object]:
    """Return the table: ``transformers`` (its version), ``keys`` by family, ``rope`` by type and then by
    family, and ``causal_lms``, the class of every model type that transformers has.
    """
    kinds = _rope_functions()
    rope = {kind: sorted(_rope_reads(_definitions("modeling_rope_utils")[name])) for kind, name in kinds}
    return {
        "transformers": importlib.metadata.version("transformers"),
        "keys": {name: sorted(_keys(row)) for name, row in FAMILIES.items()},
        "rope": rope,
        "default_rope": {name: sorted(_default_rope(row)) for name, row in FAMILIES.items()},
        "causal_lms": _causal_lms(),
    }


def text() -> str:
    """Return the table as the file holds it."""
    return json.dumps(table(), indent=2) + "\n"


def _in_transformers(family: Family) -> Family:
    """Return the family, or that by which transformers computes the same."""
    return FAMILIES[family.reference] if family.reference else family


def _keys(family: Family) -> set[str]:
    if family.reference:
        own = _OTHER_NAMES[family.architecture]
        found = _keys(FAMILIES[family.reference])
        return (found - set(own)) | {name for name in own.values() if name}
    place = family.module or family.architecture
    modelling = f"models.{place}.modeling_{place}"
    own = family.architecture if _has_config(family.architecture) else place
    configuration = f"models.{own}.configuration_{own}"
    read = {key for node in _reached(modelling, family.causal_lm) for key in _config_reads(node)}
    for module, name in ((configuration, _config_class(configuration, family)), *_BASES):
        read |= {key for node in _building(_definitions(module)[name]) for key in _own_reads(node)}
    # What the classes keep to themselves is private, a method or a value of the class.
    public = {key for key in read if not key.startswith("_") and not key.endswith(_DROPOUT)}
    return public - _class_members() - set(_WITHOUT_EFFECT)


def _config_class(configuration: str, family: Family) -> str:
    """Return the class of a module whose ``model_type`` is the family's."""
    for name, node in _definitions(configuration).items():
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.Assign) and ast.unparse(part) == f"model_type = {family.architecture!r}":
                return name
    raise LookupError(f"{configuration} has no config of model_type {family.architecture}")


def _has_config(family: str) -> bool:
    """Tell whether a family's config is in a module of its own name."""
    try:
        _source(f"models.{family}.configuration_{family}")
    except FileNotFoundError:
        return False
    return True


@functools.cache
def _source(module: str) -> ast.Module:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    return ast.parse(root.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))


@functools.cache
def _definitions(module: str) -> dict[str, ast.stmt]:
    """Return a module's classes, functions and values by name."""
    found: dict[str, ast.stmt] = {}
    for node in _source(module).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


@functools.cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """Return, for each name imported from a followed module, that module and the name there."""
    package = module.split(".")[:-1]
    found = {}
    for node in ast.walk(_source(module)):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            above = package[: len(package) - node.level + 1]
            origin = ".".join([*above, node.module])
            if origin in _FOLLOWED:
                found |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
    return found


def _reached(module: str, name: str) -> Iterator[ast.AST]:
    """Yield every definition that ``name`` of ``module`` leads to, itself first."""
    waiting, seen = [(module, name)], set()
    while waiting:
        place = waiting.pop()
        origin, wanted = place
        node = _definitions(origin).get(wanted)
        if place in seen or node is None:
            continue
        seen.add(place)
        for part in _computing(node):
            yield part
            names = {inner.id for inner in ast.walk(part) if isinstance(inner, ast.Name)}
            waiting += [_imports(origin).get(used, (origin, used)) for used in names]


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a function or value, or a class's bases, values and methods that may lead to logits."""
    if not isinstance(node, ast.ClassDef):
        yield node
        return
    yield from node.bases
    for part in node.body:
        if not (isinstance(part, ast.FunctionDef) and part.name in _OTHER_METHODS):
            yield part


def _building(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a config's class that run when a file has been read."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.FunctionDef) and (
            part.name in _BUILDING or part.name.startswith("validate_")
        ):
            yield part


def _config_reads(node: ast.AST) -> Iterator[str]:
    """Yield the keys that are read of what is called a config."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load) and _is_config(part.value):
            yield part.attr
        elif isinstance(part, ast.Call) and _looks_up(part) and _is_config(part.args[0]):
            yield from _strings(part.args[1:2])


def _own_reads(node: ast.AST) -> Iterator[str]:
    """Yield the keys that a config's class reads of itself, and of what a file says beside its fields."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
            if _is_name(part.value, "self"):
                yield part.attr
        elif isinstance(part, ast.Call) and _looks_up(part) and _is_name(part.args[0], "self"):
            yield from _strings(part.args[1:2])
        elif isinstance(part, ast.Call) and _is_name(_called_on(part, "get", "pop"), "kwargs"):
            yield from _strings(part.args[:1])


def _rope_reads(node: ast.AST) -> Iterator[str]:
    """Yield the keys that are read of rotary settings."""
    for part in ast.walk(node):
        if isinstance(part, ast.Subscript) and _is_rope(part.value):
            yield from _strings([part.slice])
        elif isinstance(part, ast.Call) and _is_rope(_called_on(part, "get")):
            yield from _strings(part.args[:1])


def _default_rope(family: Family) -> set[str]:
    """Return what a family's unscaled rotary embedding reads."""
    row = _in_transformers(family)
    place = row.module or row.architecture
    tree = _source(f"models.{place}.modeling_{place}")
    return {
        key
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "compute_default_rope_parameters"
        for key in _rope_reads(node)
    }


def _rope_functions() -> list[tuple[str, str]]:
    """Return each rotary type with the function that computes it."""
    node = _definitions("modeling_rope_utils")["ROPE_INIT_FUNCTIONS"]
    assert isinstance(node, ast.AnnAssign)
    assert isinstance(node.value, ast.Dict)
    pairs = zip(node.value.keys, node.value.values, strict=True)
    return [(key.value, value.id) for key, value in pairs if isinstance(key, ast.Constant)]  # type: ignore[attr-defined,misc]


def _causal_lms() -> dict[str, str]:
    node = _definitions("models.auto.modeling_auto")["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]
    names: dict[str, str] = {}
    for part in ast.walk(node):
        if isinstance(part, ast.Tuple) and len(found := list(_strings(part.elts))) == 2:
            names[found[0]] = found[1]
    return dict(sorted(names.items()))


@functools.cache
def _class_members() -> frozenset[str]:
    """Return the methods and values of the classes that every config inherits from: no file sets them."""
    classes = (*_BASES, ("integrations.heterogeneity.configuration_utils", "HeterogeneousConfigMixin"))
    found: set[str] = set()
    for module, name in classes:
        for part in ast.iter_child_nodes(_definitions(module)[name]):
            if isinstance(part, ast.FunctionDef) and part.name not in _PROPERTIES_OF_FILES:
                found.add(part.name)
            elif isinstance(part, ast.Assign):
                found |= {target.id for target in part.targets if isinstance(target, ast.Name)}
            elif isinstance(part, ast.AnnAssign) and "ClassVar" in ast.unparse(part.annotation):
                found.add(ast.unparse(part.target))
    return frozenset(found)


def _looks_up(call: ast.Call) -> bool:
    """Tell whether a call is ``getattr(x, ...)`` or ``hasattr(x, ...)``."""
    return _is_name(call.func, "getattr", "hasattr") and len(call.args) > 1


def _called_on(call: ast.Call, *methods: str) -> ast.expr | None:
    """Return what one of ``methods`` is called on."""
    named = isinstance(call.func, ast.Attribute) and call.func.attr in methods
    return call.func.value if named and isinstance(call.func, ast.Attribute) else None


def _is_config(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "get_text_config" and _is_config(node.func.value)
    return _is_name(node, *_CONFIGS) or (isinstance(node, ast.Attribute) and node.attr == "config")


def _is_rope(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
        return _is_rope(node.value)  # the settings of one kind of layer
    return _is_name(node, *_ROPE) or (isinstance(node, ast.Attribute) and node.attr == "rope_parameters")


def _is_name(node: ast.AST | None, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _strings(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
