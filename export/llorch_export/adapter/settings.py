"""An adapter's ``adapter_config.json``, read as PEFT's merge reads it.

What the merge depends on is understood or refused by name. What it does not read is ignored: without a word
where it says nothing (training, provenance, null), else with a notice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llorch_export.adapter.targets import Pattern, Targets, read_pattern, read_targets
from llorch_export.config.fields import Fields, quoted
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError

MERGE_FIRST: Final = "merge it with PEFT (merge_and_unload, save_pretrained) and export the result"

_MAX_RANK: Final = 2**10
_MAX_ALPHA: Final = 1e6
_MAX_PATTERNS: Final = 2**13
_MAX_STATES: Final = 2000  # of all expressions of a key together; eight of Unsloth's
_MAX_TOKENS: Final = 2**16
_MAX_SAVED: Final = 2**10  # each is looked for in the name of every module

# What PEFT adapts where the config names no modules; it knows no default for the other families.
_DEFAULT_TARGETS: Final = frozenset({"q_proj", "v_proj"})
_WITH_DEFAULT_TARGETS: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Ways to start training that leave the base weights alone.
_NEUTRAL_STARTS: Final = frozenset({"gaussian", "orthogonal", "eva", "mica"})
_CHANGED_STARTS: Final = (
    ("pissa", "subtracts the leading singular vectors of each weight"),
    ("olora", "subtracts leading parts of each weight's QR decomposition"),
    ("corda", "subtracts directions that were found on data which the adapter does not carry"),
    ("lora_ga", "subtracts directions that were found from gradients which the adapter does not carry"),
    ("loftq", "replaces each weight by a quantised one"),
)
# Variants that compute something else than W + scaling B A, and what they compute.
_VARIANTS: Final = {
    "alora_invocation_tokens": "adapts only what follows certain tokens",
    "arrow_config": "routes each token to one of several adapters",
    "kasa_config": "cuts singular values of the base weights off",
    "layer_replication": "repeats layers of the base model",
    "megatron_config": "is for layers of Megatron",
    "target_parameters": "adapts parameters of experts",
    "use_bdlora": "has factors of another shape",
    "use_qalora": "pools the inputs of its layers",
}
# Of training, of how it starts, and of where the adapter came from.
_NOT_READ: Final = frozenset(
    {
        "auto_mapping", "corda_config", "eva_config", "inference_mode", "loftq_config", "lora_dropout",
        "lora_ga_config", "megatron_core", "monteclora_config", "peft_version", "qalora_group_size",
        "revision", "runtime_config", "task_type", "velora_config",
    }
)  # fmt: skip
_QUANTISED: Final = re.compile(r"bnb|4-?bit|8-?bit|gptq|awq|int[48]|nf4|quantized", re.IGNORECASE)
_NO_NAME: Final = ("", ".", "..", "local")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What a merge needs to know beside the tensors.

    rank, alpha: of modules without a pattern of their own; patterns: the first that has a module counts.
    biases: which of the base model's biases were trained: ``none``, ``all``, or ``lora_only``, those of
        modules with factors. lora_bias: whether the second factors have biases.
    tokens: by the end of an embedding's or head's name, the rows that were trained.
    ties: whether what adapts the embedding adapts a tied head.
    notices: what a person should know, a line each.
    """

    origin: str
    rank: int
    alpha: float
    by_root: bool
    ranks: tuple[tuple[Pattern, int], ...]
    alphas: tuple[tuple[Pattern, float], ...]
    targets: Targets
    dora: bool
    lora_bias: bool
    biases: str
    tokens: Mapping[str, tuple[int, ...]]
    ties: bool
    base_model: str | None
    notices: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's factors."""
        return next((rank for pattern, rank in self.ranks if pattern.have(module)), self.rank)

    def scaling_of(self, module: str) -> float:
        """Return what the product of a module's factors is multiplied by."""
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.have(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def read_settings(data: Mapping[str, object], *, origin: str, base: LlamaConfig) -> AdapterSettings:
    """Read the content of an ``adapter_config.json``; ``origin`` names it, ``base`` is the model it is for.

    Raises ArtifactError for what is malformed, not understood, or more than can be merged.
    """
    fields = Fields(data, origin=origin)
    _refuse_variants(fields, origin)
    saved = _names(fields, "modules_to_save")
    default = _DEFAULT_TARGETS if base.architecture in _WITH_DEFAULT_TARGETS else frozenset()
    targets, notices = read_targets(fields, saved, default)
    rank = fields.integer("r", 8, high=_MAX_RANK)
    alpha = fields.number("lora_alpha", 8, above=0, high=_MAX_ALPHA)
    ranks, alphas = (_patterns(fields, key, origin) for key in ("rank_pattern", "alpha_pattern"))
    if fields.boolean("fan_in_fan_out", False):
        notices.append("fan_in_fan_out has no effect on linear layers, which is what these models have")
    ties = fields.boolean("ensure_weight_tying", False)
    if ties and not base.tie_word_embeddings:
        notices.append("ensure_weight_tying has no effect, because the base model has two tables")
    bias = fields.get("bias")
    if bias not in (None, "none", "all", "lora_only"):
        raise fields.wrong("bias", "'none', 'all' or 'lora_only'")
    name = fields.get("base_model_name_or_path")
    return AdapterSettings(
        origin=origin,
        rank=rank,
        alpha=alpha,
        by_root=fields.boolean("use_rslora", False),
        ranks=tuple((pattern, own.integer(pattern.key, high=_MAX_RANK)) for pattern, own in ranks),
        alphas=tuple((p, own.number(p.key, above=0, high=_MAX_ALPHA)) for p, own in alphas),
        targets=targets,
        dora=fields.boolean("use_dora", False),
        lora_bias=fields.boolean("lora_bias", False),
        biases="none" if bias is None else bias,
        tokens=_tokens(fields, tied=base.tie_word_embeddings),
        ties=ties and base.tie_word_embeddings,
        base_model=name if isinstance(name, str) else None,
        notices=(*notices, *_ignored(fields, data, origin)),
    )


def _refuse_variants(fields: Fields, origin: str) -> None:
    """Refuse what is no LoRA, or one whose merge is not W + scaling B A."""
    kind = fields.get("peft_type")
    if kind is None and ("lora_parameters" in fields or "fine_tune_type" in fields):
        raise ArtifactError(
            f"{origin} is of MLX, expected PEFT's; fuse it with mlx_lm.fuse and export the result"
        )
    if kind != "LORA":
        what = "a fully trained model, no adapter" if kind == "full" else "an adapter of another kind"
        raise ArtifactError(
            f"{origin}: peft_type is {quoted(kind)}, which is {what}; expected 'LORA'. If it is an adapter, "
            f"{MERGE_FIRST}"
        )
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _NEUTRAL_STARTS:
        known = next((what for name, what in _CHANGED_STARTS if start.lower().startswith(name)), None)
        what = known or "is not known, and may change the base weights"
        raise ArtifactError(
            f"{origin}: init_lora_weights is {start[:40]!r}, which {what} before training starts. Save the "
            f"adapter with path_initial_model_for_weight_conversion, or {MERGE_FIRST}"
        )
    for key, what in _VARIANTS.items():
        if not _is_neutral(fields.get(key)):
            raise ArtifactError(
                f"{fields.wrong(key, 'none')}, because a model that {what} is no sum of weights; it cannot "
                f"be merged"
            )


def _names(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.get(key)
    if value is None:
        return ()
    if (
        not isinstance(value, list)
        or len(value) > _MAX_SAVED
        or not all(isinstance(item, str) and item for item in value)
    ):
        raise fields.wrong(key, f"at most {_MAX_SAVED} names of modules")
    return tuple(value)


def _patterns(fields: Fields, key: str, origin: str) -> list[tuple[Pattern, Fields]]:
    """Return the keys of a pattern setting, each with the fields that hold its value."""
    found = fields.mapping(key)
    patterns = [read_pattern(name, f"{origin}: {key}") for name in found]
    states = sum(pattern.expression.size for pattern in patterns if pattern.expression is not None)
    if len(patterns) > _MAX_PATTERNS or states > _MAX_STATES:
        raise ArtifactError(
            f"{origin}: {key} has {len(patterns)} keys and its expressions {states} states, expected at most "
            f"{_MAX_PATTERNS} and {_MAX_STATES}; write modules' names in place of expressions"
        )
    own = Fields(found, origin=f"{origin}: {key}")
    return [(pattern, own) for pattern in patterns]


def _tokens(fields: Fields, *, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return ``trainable_token_indices``: a list is for the embedding, an object names its modules.

    What is said of a tied embedding alone is for the head too.
    """
    value = fields.get("trainable_token_indices")
    if value is None:
        return {}
    found = {"embed_tokens": value} if isinstance(value, list) else value
    if not isinstance(found, Mapping):
        raise fields.wrong("trainable_token_indices", "a list of token ids, or one for each module")
    for ids in found.values():
        if (
            not isinstance(ids, list)
            or len(ids) > _MAX_TOKENS
            or not all(type(item) is int and item >= 0 for item in ids)
            or len(set(ids)) != len(ids)
        ):
            raise fields.wrong("trainable_token_indices", "lists of different token ids")
    if tied and len(found) == 1 and str(next(iter(found))).endswith("embed_tokens"):
        found = {**found, "lm_head": next(iter(found.values()))}
    return {name: tuple(ids) for name, ids in found.items()}


def _ignored(fields: Fields, data: Mapping[str, object], origin: str) -> list[str]:
    """Return a notice of keys that PEFT does not know; refuse those that are switched on.

    A number switches nothing on by itself: PEFT's are sizes of what a flag, an object or a list asks for.
    """
    unknown = fields.unasked(known=_NOT_READ)
    loud = [key for key in unknown if not _is_neutral(data[key]) and type(data[key]) not in (int, float)]
    if loud:
        raise ArtifactError(
            f"{origin} has settings that are not understood and might change the merge: "
            f"{', '.join(f'{key} = {str(data[key])[:40]}' for key in loud[:8])}; remove them if they have no "
            f"influence, or {MERGE_FIRST}"
        )
    if not unknown:
        return []
    return [f"settings that PEFT's merge does not read are ignored: {', '.join(unknown[:8])}"]


def _is_neutral(value: object) -> bool:
    """Tell whether a value switches nothing on."""
    return value is None or value is False or value in ("", [], {}, "none")


def base_model_notice(settings: AdapterSettings, source: str) -> str | None:
    """Return a notice if the adapter was trained on another model than ``source``, a name, as far as names
    tell.
    """
    name = settings.base_model
    last = "" if name is None else name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    if name is None or last in _NO_NAME or _plain(last) == _plain(source):
        return None
    shown = name[:120]
    if _QUANTISED.search(last) and not _QUANTISED.search(source):
        return f"it was trained on the quantised {shown}, and is merged into the weights of {source}"
    return f"it was trained on {shown}, and is merged into {source}"


def _plain(name: str) -> str:
    """Return a name without what file names and titles write differently."""
    return re.sub(r"[\W_]", "", name).lower()
