"""Token ids on which an artifact is run to be judged: English text where its tokenizer knows the text, else
random ones.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from llorch_serve.artifact.folder import Artifact
from llorch_serve.bench.workload import sample_text
from llorch_serve.text.tokenizer import Tokenizer

_RANDOM_TOKENS: Final = 512
_MAX_UNKNOWN: Final = 0.1


def token_ids(artifact: Artifact) -> tuple[list[int], str]:
    """Return the ids to compare on, and whether they are ``sample`` text or ``random``."""
    tokenizer = Tokenizer.load(artifact.tokenizer_path)
    vocabulary = artifact.manifest.model.vocab_size
    ids = tokenizer.encode(sample_text(), add_special_tokens=False)
    unknown = sum(id_ >= vocabulary or id_ == tokenizer.unknown_id for id_ in ids)
    if ids and unknown <= _MAX_UNKNOWN * len(ids):
        return [id_ for id_ in ids if id_ < vocabulary], "sample"
    return np.random.default_rng(0).integers(0, vocabulary, _RANDOM_TOKENS).tolist(), "random"
