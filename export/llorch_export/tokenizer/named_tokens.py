"""The tokens that a Hugging Face folder gives a role: ``bos_token``, ``pad_token``, and so on.

Input is ``tokenizer_config.json`` and the older ``special_tokens_map.json``; output is a text by role, as
transformers 5 reads them. Chat templates see all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.tokenizer.added_tokens import DECODER, ROLES
from llorch_serve.errors import ArtifactError

SPECIAL_TOKENS_MAP: Final = "special_tokens_map.json"
# What transformers' tokenizer classes give roles that a folder does not mention.
_ENDOFTEXT: Final = "<|endoftext|>"
_OF_CLASSES: Final[Mapping[str, Mapping[str, str]]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), _ENDOFTEXT),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _ENDOFTEXT),
}
_MOST_CHARS: Final = 4096
_MOST_ROLES: Final = 256  # this and the next: what a manifest may hold
_LONGEST_ROLE: Final = 200
_WORD: Final = re.compile(r"\w+")


def tokenizer_class(settings: Mapping[str, object], config: Mapping[str, object]) -> str:
    """Return the name of the class that the folder asks for, without ``Fast``; empty if it names none."""
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return name.removesuffix("Fast") if isinstance(name, str) else ""


def named_tokens(folder: ModelFolder, settings: Mapping[str, object], name: str) -> dict[str, str]:
    """Return the text of each role's token. A role that is null has none; an empty text is kept.

    name: the class that reads the folder; its defaults count for roles that no file mentions.

    ``special_tokens_map.json`` counts, and comes first, where tokenizer_config.json has no
    ``added_tokens_decoder``. Raises ArtifactError for a token that is no text.
    """
    found = dict(_OF_CLASSES.get(name, {}))
    origin = str(folder.path / "tokenizer_config.json")
    _take(found, settings, origin)
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        _take(found, extra, f"{origin}: extra_special_tokens", every=True)
    if DECODER not in settings:
        _take(found, folder.read_json(SPECIAL_TOKENS_MAP) or {}, str(folder.path / SPECIAL_TOKENS_MAP))
    return found


def seen_by_templates(
    templates: Iterable[str], named: Mapping[str, str], *, starts: bool, ends: bool
) -> dict[str, str] | None:
    """Return the tokens that chat templates mention by role; None if those are begin and end of sequence, as
    the ids say. Raises ArtifactError for an absurd number of them.
    """
    sources = tuple(templates)
    words = {word for source in sources for word in _WORD.findall(source) if word.endswith("_token")}
    plain = {role for role, known in (("bos_token", starts), ("eos_token", ends)) if known}
    mentioned = {role: text for role, text in named.items() if role in words}
    if len(mentioned) > _MOST_ROLES or any(len(role) > _LONGEST_ROLE for role in mentioned):
        raise ArtifactError(
            f"the chat template mentions {len(mentioned)} named tokens, expected at most {_MOST_ROLES}, with "
            f"names of at most {_LONGEST_ROLE} characters; correct tokenizer_config.json"
        )
    missing = words & {"bos_token", "eos_token"} - mentioned.keys()
    return mentioned if mentioned.keys() - plain or missing else None


def _take(found: dict[str, str], data: Mapping[str, object], origin: str, *, every: bool = False) -> None:
    for role, value in data.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        own = role in ROLES or every
        if not (own or (role.endswith("_token") and isinstance(text, str))):
            continue
        if text is None and not isinstance(value, Mapping):
            found.pop(role, None)
        elif isinstance(text, str) and len(text) <= _MOST_CHARS:
            found[role] = text
        else:
            raise ArtifactError(
                f"{origin}: {role} is {repr(value)[:80]}, expected a token's text of at most {_MOST_CHARS} "
                f"characters, an object with content, or null; correct it"
            )
