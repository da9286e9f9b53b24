"""How long other threads wait while texts are parsed, rendered and tokenised: the longest gap of a thread
that asks for its turn every millisecond.

    ci/measurement lock_stalls ARTIFACT

Each row is a text of 2 or 14 MiB of one kind: parsed as a message of ``Tokenize``, tokenised, and half of it
put through the chat template for a context of 8,192 tokens. What is refused counts, too. Health waits as long
as such a thread. Means something on a machine with nothing else to do.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.errors import InvalidRequestError
from llorch_serve.requests import ChatMessage, ChatPrompt, TextPrompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.wire import check_fields
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.prompts import COUNTED_TOKENS, PromptEncoder

KINDS = {"spaces": " ", "a letter": "a", "Chinese": "\u4f60", "full-width letters": "\uff21", "words": "a, "}
MIB = 2**20


def longest_gap_ms(work: Callable[[], object]) -> tuple[float, float]:
    """Return the longest gap while ``work`` runs on another thread, in milliseconds, and how long that took,
    in seconds.
    """
    gaps, over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(1000 * (now - last))
            last = now

    def run() -> None:
        with contextlib.suppress(InvalidRequestError):
            work()

    ticking, working = threading.Thread(target=tick), threading.Thread(target=run)
    ticking.start()
    begun = time.perf_counter()
    working.start()
    working.join()
    took = time.perf_counter() - begun
    over.set()
    ticking.join()
    return max(gaps), took


def main(folder: Path) -> None:
    """Measure every kind and print a table."""
    artifact = load_artifact(folder)
    prompts = PromptEncoder(artifact, Tokenizer.load(artifact.tokenizer_path))

    def parse(raw: bytes) -> str:
        check_fields(raw, pb.TokenizeRequest.DESCRIPTOR)
        return pb.TokenizeRequest.FromString(raw).input.text

    heads = ("text", "MiB", "parsed: gap", "tokenised: gap, took", "as a chat: gap, took")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")  # noqa: T201
    for name, character in KINDS.items():
        for size in (2, 14):
            text = character * (size * MIB // len(character.encode()))
            message = pb.TokenizeRequest()
            message.input.text = text
            raw = message.SerializeToString()
            chat = ChatPrompt((ChatMessage("user", text[: len(text) // 2]),))
            parsed, _ = longest_gap_ms(lambda raw=raw: parse(raw))
            plain = longest_gap_ms(lambda text=text: prompts.encode(TextPrompt(text), context=COUNTED_TOKENS))
            rendered = longest_gap_ms(lambda chat=chat: prompts.encode(chat, context=8192))
            cells = [f"{gap:.0f} ms, {took:.2f} s" for gap, took in (plain, rendered)]
            print(f"| {name} | {size} | {parsed:.0f} ms | {' | '.join(cells)} |")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
