"""Ids of Mistral's own tokenizers: run by an interpreter that has mistral-common, not by pytest's.

usage: PYTHON run_mistral.py FILE <texts       a JSON array of texts; prints a JSON array of arrays of ids,
       without those of BOS and EOS
"""

from __future__ import annotations

import json
import sys

from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer, is_tekken

if __name__ == "__main__":
    path = sys.argv[1]
    tokenizer = Tekkenizer.from_file(path) if is_tekken(path) else SentencePieceTokenizer(path)
    ids = [tokenizer.encode(text, bos=False, eos=False) for text in json.load(sys.stdin)]
    print(json.dumps(ids))  # noqa: T201 - a script's output
