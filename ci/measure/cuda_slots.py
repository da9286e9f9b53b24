"""Print how far CUDA's logits are from the CPU's where slots are copied, exchanged and stepped together.

    ci/measurement cuda_slots ARTIFACT [KEY=VALUE ...]

The largest difference of logits as part of the largest logit, one line for each call. KEY=VALUE: options of
the provider.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.providers import ProviderChoice
from llorch_serve.runtime.opening import open_session
from llorch_serve.runtime.session import DecoderSession


def calls(session: DecoderSession) -> list[np.ndarray]:
    """Prompts, chunks, copied and exchanged slots, steps of one to three sequences, a check of a draft."""
    first, second, third = ([*range(base, base + 40)] for base in (1000, 2000, 3000))
    found = [session.prefill(0, first, 0).copy(), session.prefill(1, second, 0).copy()]
    found.append(session.prefill(1, third[:9], 40, range(9)).copy())
    found += [session.decode([7, 8], [41, 50]).copy() for _ in range(4)]
    session.copy_slot(0, 2, 41)
    session.swap_slots(0, 1, 50)
    found += [session.decode([1, 2, 3], [51, 42, 42]).copy() for _ in range(4)]
    found.append(session.verify(2, [4, 5, 6], 42).copy())
    found += [session.decode([9], [52]).copy(), session.decode([1, 2], [53, 43]).copy()]
    return found


def main(folder: Path, options: tuple[str, ...]) -> None:
    """Run both."""
    results = []
    for provider in (ProviderChoice(), ProviderChoice("cuda", options)):
        config = SessionConfig(slots=3, max_context=512, provider=provider)
        results.append(calls(open_session(load_artifact(folder), config, lambda report: None)))
    for expected, found in zip(*results, strict=True):
        print(np.abs(found - expected).max() / np.abs(expected).max())  # noqa: T201 - what it is for


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]))
