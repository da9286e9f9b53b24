"""Print how far CUDA's logits are from the CPU's where slots are copied, exchanged and stepped together, with
padding and without; fail where the device chooses or finds others than the largest logits.

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
from llorch_serve.runtime.opening import LoadReport, open_session
from llorch_serve.runtime.session import DecoderSession


def calls(session: DecoderSession) -> list[np.ndarray]:
    """Prompts, chunks, copied and exchanged slots, steps of one to three sequences, a check of a draft."""
    first, second, third = ([*range(base, base + 40)] for base in (1000, 2000, 3000))
    found = [session.prefill(0, first, 0).copy(), session.prefill(1, second, 0).copy()]
    found.append(session.prefill(1, third[:9], 40, range(9)).copy())
    found += [step(session, [7, 8], [41, 50]) for _ in range(4)]
    session.copy_slot(0, 2, 41)
    session.swap_slots(0, 1, 50)
    found += [step(session, [1, 2, 3], [51, 42, 42]) for _ in range(4)]
    found.append(session.verify(2, [4, 5, 6], 42).copy())
    found += [step(session, [9], [52]), step(session, [1, 2], [53, 43])]
    return found


def step(session: DecoderSession, token_ids: list[int], lengths: list[int]) -> np.ndarray:
    """Return the logits of a step, after what the device finds among them in the same one."""
    able, rows = session.capabilities, range(len(lengths))
    if able.greedy_decode:
        chosen = session.decode_greedy(token_ids, lengths).tolist()
        likeliest = session.step_logits(rows).argmax(axis=1).tolist()
        if chosen != likeliest:
            sys.exit(f"{chosen} were chosen of logits whose largest are at {likeliest}")
    if able.leading_decode:
        _, scores, _ = session.decode_leading(token_ids, lengths, [1.0] * len(lengths))
        if not np.array_equal(scores, -np.sort(-session.step_logits(rows), axis=1)[:, : able.leading_decode]):
            sys.exit("other logits were found than the largest")
    return session.decode(token_ids, lengths).copy()


def tell(report: LoadReport) -> None:
    """Say what a person should know."""
    if report.notice is not None:
        print(report.notice, file=sys.stderr)  # noqa: T201 - as above


def main(folder: Path, options: tuple[str, ...]) -> None:
    """Run both."""
    results = []
    for provider in (ProviderChoice(), ProviderChoice("cuda", options)):
        config = SessionConfig(slots=5, max_context=512, provider=provider)
        session = open_session(load_artifact(folder), config, tell)
        if session.capabilities.greedy_decode != (provider.name == "cuda"):
            sys.exit("CUDA does not choose tokens here")
        if bool(session.capabilities.leading_decode) != (provider.name == "cuda"):
            sys.exit("CUDA does not find the likeliest tokens here")
        results.append(calls(session))
    for expected, found in zip(*results, strict=True):
        print(np.abs(found - expected).max() / np.abs(expected).max())  # noqa: T201 - what it is for


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]))
