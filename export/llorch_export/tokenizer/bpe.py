"""Build tokenizer.json from a bare vocabulary.

Input is a :class:`Vocabulary`; output is a ``tokenizers.Tokenizer``. Two families: byte-level BPE (GPT-2,
Llama 3, SmolLM), and SentencePiece BPE with byte fallback (Llama 1 and 2), whose merge order follows from
piece scores.
"""

from __future__ import annotations

import math
from typing import Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from llorch_export.config.fields import quoted
from llorch_export.tokenizer.splitting import SplittingRules
from llorch_export.tokenizer.vocabulary import SPECIAL_KINDS, TokenKind, Vocabulary
from llorch_serve.errors import ArtifactError
from llorch_serve.text.tokenizer_library import (
    MAX_MERGES,
    MAX_PIECE_CHARS,
    MAX_TOKEN_CHARS,
    check_token_sizes,
    rust_call,
)

SPACE: Final = "\u2581"  # SentencePiece's visible space

# Special tokens of Phi-3 that leave the white space after them where it is.
_KEEP_SPACE: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def byte_level_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """Return a byte-level BPE tokenizer. Raises ArtifactError for broken merges or huge tokens."""
    check_token_sizes(vocabulary.tokens, longest=MAX_TOKEN_CHARS, origin=vocabulary.origin)
    merges = []
    for index, merge in enumerate(vocabulary.merges):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ArtifactError(
                f"{vocabulary.origin}: merge {index} is {quoted(merge)}, expected two tokens and a space"
            )
        merges.append((left, right))
    rules = vocabulary.rules
    merges = list(dict.fromkeys(merges))  # of a merge that is there twice the first counts, as for llama.cpp
    tokenizer = _tokenizer(
        vocabulary, merges, byte_fallback=False, fuse_unk=False, ignore_merges=rules.whole_words_first
    )
    if rules.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer(rules)
    tokenizer.decoder = decoders.ByteLevel()
    _finish(tokenizer, vocabulary)
    return tokenizer


def pre_tokenizer(rules: SplittingRules) -> pre_tokenizers.PreTokenizer:
    """Return what cuts a text by the rules, and writes its bytes as characters."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def sentencepiece_bpe(vocabulary: Vocabulary) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer.

    Raises ArtifactError for huge pieces, scores that are no finite numbers, or with neither byte tokens nor
    an unknown one.
    """
    check_token_sizes(vocabulary.tokens, longest=MAX_PIECE_CHARS, origin=vocabulary.origin)
    for index, score in enumerate(vocabulary.scores):
        if not math.isfinite(score):  # NaN has no place in an order
            raise ArtifactError(
                f"{vocabulary.origin}: the score of token {index} is {score}, expected a finite number; "
                f"convert the "
                "model again"
            )
    if TokenKind.BYTE not in vocabulary.kinds and vocabulary.unknown is None:
        raise ArtifactError(
            f"{vocabulary.origin} has neither byte tokens nor an unknown token, so it cannot take any text"
        )
    tokenizer = _tokenizer(
        vocabulary,
        _merges_by_score(vocabulary),
        byte_fallback=TokenKind.BYTE in vocabulary.kinds,
        fuse_unk=True,
        ignore_merges=False,
    )
    visible = normalizers.Replace(" ", SPACE)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), visible])
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = visible
        tokenizer.decoder = decoders.Sequence(back)
    _finish(tokenizer, vocabulary)
    return tokenizer


def _tokenizer(
    vocabulary: Vocabulary,
    merges: list[tuple[str, str]],
    *,
    byte_fallback: bool,
    fuse_unk: bool,
    ignore_merges: bool,
) -> Tokenizer:
    ids: dict[str, int] = {}
    for index, token in enumerate(vocabulary.tokens):
        # A token without text can be generated, but never comes out of text; its name only has to be unique.
        name = token or f"<empty-{index}>"
        if name in ids:
            raise ArtifactError(
                f"{vocabulary.origin}: tokens {ids[name]} and {index} are both {name!r}, expected distinct "
                f"tokens; "
                "convert the model again"
            )
        ids[name] = index
    known = next(
        (pair for pair in merges if not (pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids)),
        None,
    )
    if known is not None:
        raise ArtifactError(
            f"{vocabulary.origin}: merge {quoted(known)} uses a token that the vocabulary lacks; convert the "
            f"model again"
        )
    unknown = None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown] or None
    with rust_call:
        return Tokenizer(
            models.BPE(
                vocab=ids,
                merges=merges,
                unk_token=unknown if byte_fallback or fuse_unk else None,
                fuse_unk=fuse_unk,
                byte_fallback=byte_fallback,
                ignore_merges=ignore_merges,
            )
        )


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that build each normal piece out of two others, best score first.

    SentencePiece always joins the neighbours whose union scores highest; a table of all ways to make a piece,
    ordered by the piece's score, does the same.
    """
    normal = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind is TokenKind.NORMAL
    }
    merges: list[tuple[str, str]] = []
    for piece in sorted(normal, key=lambda token: (-vocabulary.scores[normal[token]], normal[token])):
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        ways = [(left, right) for left, right in pairs if left in normal and right in normal]
        merges += sorted(ways, key=lambda way: (normal[way[0]], normal[way[1]]))
        if len(merges) > MAX_MERGES:
            raise ArtifactError(
                f"{vocabulary.origin}: its pieces are made of others in more than {MAX_MERGES} ways, which "
                f"no trained "
                "vocabulary needs; convert the model again"
            )
    return merges


def _finish(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Mark the tokens that text is searched for before anything else, and set the rules for BOS and EOS."""
    added = [
        # normalized=False: they are found in the text as it was sent, before spaces are replaced.
        AddedToken(
            token,
            special=kind is not TokenKind.USER_DEFINED,
            normalized=False,
            rstrip=vocabulary.strips_space and token not in _KEEP_SPACE,
        )
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if token and kind in SPECIAL_KINDS
    ]
    with rust_call:
        tokenizer.add_tokens([token for token in added if not token.special])
        tokenizer.add_special_tokens([token for token in added if token.special])
    before = _template_token(vocabulary, vocabulary.bos, "bos") if vocabulary.add_bos else None
    after = _template_token(vocabulary, vocabulary.eos, "eos") if vocabulary.add_eos else None
    if before is None and after is None:
        return
    head, tail = (f"{before[0]} " if before else ""), (f" {after[0]}" if after else "")
    with rust_call:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{head}$A{tail}",
            pair=f"{head}$A{tail} {head.replace(' ', ':1 ')}$B:1{tail + ':1' if tail else ''}",
            special_tokens=sorted({token for token in (before, after) if token}),
        )


def _template_token(vocabulary: Vocabulary, token_id: int | None, role: str) -> tuple[str, int]:
    if token_id is None:
        raise ArtifactError(
            f"{vocabulary.origin} asks for a {role} token around text but names none; convert it again"
        )
    text = vocabulary.tokens[token_id]
    # Templates are written as words, with a colon before a number, and a dollar sign before what stands for a
    # text.
    if not text or ":" in text or text.startswith("$") or text.split() != [text]:
        raise ArtifactError(
            f"{vocabulary.origin}: the {role} token is {text!r}, expected text without spaces and colons, "
            f"and no $ before it"
        )
    return text, token_id
