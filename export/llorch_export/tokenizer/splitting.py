"""How byte-level BPE tokenizers cut a text before they merge, by the name that GGUF files give it.

``tokenizer.ggml.pre`` names the model whose tokenizer was trained with the rules. Where llama.cpp has a
simpler rule in place of one, or none, the rule here is the model's own: llama.cpp knows no capitals beyond
ASCII, and composes no characters. Rules whose time grows by the square of a row of digits are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llorch_serve.errors import ArtifactError


@dataclass(frozen=True, slots=True)
class SplittingRules:
    """How text is cut before merging, and what else goes with it.

    patterns: regular expressions. Each cuts its matches out of what the one before left.
    whole_words_first: a piece that is a token is taken as it is, before any merge is tried.
    composes: characters are composed first (Unicode's NFC).
    adds_bos: the token for the beginning of a text comes first, where a GGUF file does not say.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    composes: bool = False
    adds_bos: bool = False


UNCUT: Final = SplittingRules(())
"""Of SentencePiece, which merges over spaces too."""

_SUFFIX: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES


def _words(
    number: str,
    *,
    suffix: str = f"{_SUFFIX}|",
    letters: str = r"[^\r\n\p{L}\p{N}]?\p{L}+",
    symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    breaks: str = r"\s*[\r\n]+",
    spaces: str = _SPACES,
) -> str:
    """Return the pattern of Llama 3 and of those that changed a part of it."""
    return f"{suffix}{letters}|{number}|{symbols}|{breaks}|{spaces}"


def _cased_words(number: str, *, suffix: str = f"{_SUFFIX}?", without: str = "", breaks: str = "/") -> str:
    """Return the pattern of GPT-4o and Tekken, where a word also ends before a capital letter.

    without: what else is no letter of a word. breaks: what may follow symbols, besides line breaks.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    letters = f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    return _words(number, suffix="", letters=letters, symbols=rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n{breaks}]*")


_DIGIT: Final = r"\p{N}"
_UP_TO_3: Final = r"\p{N}{1,3}"
_LLAMA3: Final = _words(_UP_TO_3)
_QWEN2: Final = _words(_DIGIT)
_CHINESE: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CHINESE_AND_KANA: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_PUNCTUATED: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
)
_DEEPSEEK3: Final = rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_BLOOM: Final = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Letters that have a case, as of Unicode 12.
_CASED: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_HALVING: Final = "|".join([*(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}"])
_YOUTU_SCRIPTS: Final = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)

_RULES: Final[tuple[tuple[SplittingRules, str], ...]] = (
    (
        SplittingRules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        "default",
    ),
    (
        SplittingRules((_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling",
    ),
    (
        SplittingRules((_DIGIT, _GPT2)),
        "smollm starcoder refact codeshell exaone minerva-7b mellum2",
    ),
    (SplittingRules((_DIGIT, _GPT2), composes=True), "command-r"),
    (
        SplittingRules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
        "falcon",
    ),
    (
        SplittingRules((_LLAMA3,), whole_words_first=True, adds_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (SplittingRules((_LLAMA3,), whole_words_first=True), "glm4 glm5"),
    (SplittingRules((_LLAMA3,)), "smaug-bpe dbrx chatglm-bpe"),
    (
        SplittingRules((_QWEN2,), composes=True),
        "qwen2",
    ),
    (
        SplittingRules((_QWEN2,)),
        "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    ),
    (
        SplittingRules(
            (
                _words(
                    _DIGIT,
                    letters=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                    symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                ),
            ),
            composes=True,
        ),
        "qwen35",
    ),
    (SplittingRules((_words(_DIGIT, suffix=""),)), "ufakzeka"),
    (SplittingRules((_words(_DIGIT, symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),)), "seed-coder"),
    (SplittingRules((_words(_DIGIT, breaks=r"\s*[\r\n]"),)), "bailingmoe bailingmoe2 llada-moe"),
    (SplittingRules(("[^\\n]+|[\\n]+", _QWEN2)), "laguna"),
    (SplittingRules((_UP_TO_3, _words(r"\p{N}+")), whole_words_first=True), "minicpm5"),
    (SplittingRules((_words(_UP_TO_3, spaces=_HALVING),)), "jais-2"),
    (
        SplittingRules(
            (
                _words(
                    _DIGIT,
                    letters=r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    breaks=r"\s*[\r\n]",
                ),
            )
        ),
        "exaone-moe",
    ),
    (
        SplittingRules((_cased_words(_DIGIT, suffix=""),), whole_words_first=True, adds_bos=True),
        "tekken",
    ),
    (SplittingRules((_cased_words(_UP_TO_3),)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (SplittingRules((_YOUTU_SCRIPTS, _cased_words(_DIGIT)), whole_words_first=True), "youtu"),
    (
        SplittingRules((r"\p{Han}+|" + _cased_words(_UP_TO_3, without=r"&&[^\p{Han}]", breaks=""),)),
        "kimi-k2",
    ),
    (
        SplittingRules(
            (
                r"[\r\n]",
                rf"\s?[{_CASED}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"(?<!\s)\s+$",  # tried once for each row of spaces, not from each of its places
                _CHINESE,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (SplittingRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, _DIGIT)), "deepseek-coder"),
    (
        SplittingRules((_UP_TO_3, _CHINESE_AND_KANA, _DEEPSEEK3)),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    (
        SplittingRules(
            (
                _UP_TO_3,
                _CHINESE_AND_KANA,
                rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
                _DIGIT,
            )
        ),
        "spark2_5",
    ),
    (SplittingRules((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (SplittingRules((_BLOOM, _DIGIT)), "viking"),
    (
        SplittingRules(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                _DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            adds_bos=True,
        ),
        "chameleon",
    ),
)

SPLITTING_RULES: Final = {name: rules for rules, names in _RULES for name in names.split()}
"""The rules by the name in ``tokenizer.ggml.pre``."""


def splitting_rules(name: str, *, origin: str) -> SplittingRules:
    """Return the rules of that name. Raises ArtifactError for one that is not known."""
    if name not in SPLITTING_RULES:
        raise ArtifactError(
            f"{origin}: pre-tokenizer {name[:100]!r} is not supported; supported are "
            f"{', '.join(sorted(SPLITTING_RULES))}. Export from the original Hugging Face folder"
        )
    return SPLITTING_RULES[name]
