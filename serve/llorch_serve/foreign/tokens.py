"""What the files around a foreign tokenizer say: chat template, and begin and end of sequence.

Input are ``tokenizer_config.json``, ``tokenizer.json`` and ``chat_template.jinja``, in the forms that
transformers writes; output are ids and the template's source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from llorch_serve.errors import ArtifactError
from llorch_serve.foreign.files import MAX_TEXT_BYTES, MAX_TOKENIZER_JSON_BYTES, ForeignFolder

TokenIds = int | list[int] | None
"""How configs write stop tokens: one id, several, or none."""

TEMPLATE_FOLDER = "additional_chat_templates"
MAX_TEMPLATES = 16

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_BYTES)]


class _Token(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: _Text


class _TokenizerConfig(msgspec.Struct):
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    chat_template: _Text | list[_NamedTemplate] | None = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Begin and end of sequence as templates write them, and every token that ends generation."""

    bos_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]


def special_tokens(
    folder: ForeignFolder, bos: TokenIds, ends: tuple[TokenIds, ...], vocab_size: int
) -> SpecialTokens:
    """Combine the tokens that ``tokenizer_config.json`` names with the ids of the tool's configs.

    bos, ends: as the configs have them. Raises ArtifactError for ids that the model does not know.
    """
    config = folder.read_json("tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()
    tokenizer = folder.read_json("tokenizer.json", _TokenizerFile, limit=MAX_TOKENIZER_JSON_BYTES)
    ids = {} if tokenizer is None else {token.content: token.id for token in tokenizer.added_tokens}

    def named(token: str | _Token | None) -> list[int]:
        text = token.content if isinstance(token, _Token) else token
        return [ids[text]] if text in ids else []

    starts = named(config.bos_token) + _listed(bos)
    stops = named(config.eos_token) + [id_ for value in ends for id_ in _listed(value)]
    for token_id in (*starts, *stops):
        if not 0 <= token_id < vocab_size:
            raise ArtifactError(
                f"{folder.path} names {token_id} as begin or end of sequence, expected ids from 0 to "
                f"{vocab_size - 1}; "
                "its files belong to different models"
            )
    return SpecialTokens(
        bos_token_id=next(iter(starts), None),
        eos_token_id=next(iter(stops), None),
        stop_token_ids=tuple(sorted(set(stops))),
    )


def chat_templates(folder: ForeignFolder) -> dict[str, str]:
    """Return the templates by name: those of the setting, and in their place files where there are any.

    Raises ArtifactError if there are some, but none named default.
    """
    config = folder.read_json("tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()
    named = {}
    if isinstance(config.chat_template, list):
        named = {entry.name: entry.template for entry in config.chat_template}
    elif config.chat_template:
        named = {"default": config.chat_template}
    if (template := folder.read_text("chat_template.jinja")) is not None:
        named["default"] = template
    for name in folder.names(TEMPLATE_FOLDER, ".jinja"):
        if (template := folder.read_text(f"{TEMPLATE_FOLDER}/{name}")) is not None:
            named[name.removesuffix(".jinja")] = template
    if named and "default" not in named:
        raise ArtifactError(
            f"{folder.path / 'tokenizer_config.json'} has the chat templates {sorted(named)}, expected one "
            f"named "
            "'default'; rename one"
        )
    if len(named) > MAX_TEMPLATES:
        raise ArtifactError(
            f"{folder.path} has {len(named)} chat templates, expected at most {MAX_TEMPLATES}; remove some"
        )
    return named


def _listed(value: TokenIds) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
