"""Which tokens end a turn, by the names that published vocabularies give them.

Files often name one end-of-sequence token although a chat ends with another. Input is a vocabulary, and the
chat templates of a folder; output are ids that stop an answer. The names are those of llama.cpp's
``llama-vocab.cpp`` ("EOG tokens").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from llorch_export.tokenizer.vocabulary import TokenKind

# Nobody writes these as words, so they end a turn whatever kind a converter has given them.
END_OF_TURN: Final = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
# These may be ordinary text, and end a turn if they are control tokens.
_IF_CONTROL: Final = frozenset({"</s>", "<eos>", "<EOT>", "_<EOT>", "\u2581<EOT>", "[EOT]", "[EOS]"})
# What stands between files when code is filled in: behind it an answer has nothing to say.
_BETWEEN_FILES: Final = frozenset(
    {
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
        "<|file_sep|>",
    }
)
# In a vocabulary with one of these pairs, ``<|end|>`` ends a message, and the answer goes on.
_ENDS_OF_ANSWERS: Final = (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|calls|>", "<|flush|>"}))
_END_OF_MESSAGE: Final = "<|end|>"


def end_token_ids(tokens: Sequence[str], kinds: Sequence[TokenKind]) -> tuple[int, ...]:
    """Return the tokens of a GGUF vocabulary that end an answer by their name, ascending."""
    names = END_OF_TURN - _not_ends(tokens)
    return tuple(
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if token in names or (kind is TokenKind.CONTROL and token in _IF_CONTROL | _BETWEEN_FILES)
    )


def ends_in_templates(special: Mapping[str, int], templates: Iterable[str]) -> dict[str, int]:
    """Return the special tokens that end a turn by their name and that a chat template writes."""
    sources = tuple(templates)
    names = (END_OF_TURN | _IF_CONTROL) - _not_ends(special)
    return {
        name: special[name]
        for name in sorted(names & special.keys())
        if any(name in source for source in sources)
    }


def _not_ends(tokens: Iterable[str]) -> set[str]:
    known = set(tokens)
    return {_END_OF_MESSAGE} if any(pair <= known for pair in _ENDS_OF_ANSWERS) else set()
