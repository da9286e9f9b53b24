"""Decode speed of a random model of eight experts against the dense model that one token of it is.

    ci/measurement experts_decode [PRECISION]

Writes both models, exports them and decodes by turns, one stream and several. The dense model is as wide as
the two experts that a token takes, so a step with one stream reads the same bytes. Time is that of one
processor, which other work hardly changes. Needs two gigabytes of disk and as much memory.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_serve.config import SessionConfig
from llorch_serve.runtime.opening import open_session
from support.builders.checkpoints import of_family, write_hf_folder

EXPERTS: Final = 8
ACTIVE: Final = 2
INNER: Final = 1792
CONTEXT: Final = 64
STEPS: Final = 12
TURNS: Final = 5
STREAMS: Final = (1, 4, 8)
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MODELS: Final = {
    "experts": of_family(
        "mixtral", **SIZES, num_local_experts=EXPERTS, num_experts_per_tok=ACTIVE, intermediate_size=INNER
    ),
    "dense": of_family("llama", **SIZES, intermediate_size=ACTIVE * INNER),
}


def main(precision: str) -> None:
    """Measure, and print tokens a second and their ratio for each number of streams."""
    with tempfile.TemporaryDirectory() as folder:
        sessions = {}
        for name, config in MODELS.items():
            source = write_hf_folder(Path(folder) / f"{name}-model", config, dtype="BF16")
            options = ExportOptions(str(source), Path(folder) / name, precision=precision)  # type: ignore[arg-type]
            artifact = export(options, lambda *_: None).artifact
            sessions[name] = open_session(
                artifact, SessionConfig(threads=1, slots=max(STREAMS), max_context=128), lambda _: None
            )
            for slot in range(max(STREAMS)):
                sessions[name].prefill(slot, [(7 * slot + 3 * i) % 500 for i in range(CONTEXT)], 0)
        for streams in STREAMS:
            speeds: dict[str, list[float]] = {name: [] for name in MODELS}
            for _ in range(TURNS):
                for name, session in sessions.items():
                    session.decode([1] * streams, [CONTEXT + 1] * streams)
                    began = time.process_time()
                    for step in range(STEPS):
                        tokens = [(11 * step + 5 * slot) % 500 for slot in range(streams)]
                        session.decode(tokens, [CONTEXT + 1 + step] * streams)
                    speeds[name].append(STEPS * streams / (time.process_time() - began))
            best = {name: max(found) for name, found in speeds.items()}
            ratios = [a / b for a, b in zip(speeds["experts"], speeds["dense"], strict=True)]
            print(  # noqa: T201 - a script's output
                f"{precision}, {streams} streams: experts {best['experts']:.0f}, dense {best['dense']:.0f} "
                f"tokens/s; ratio {best['experts'] / best['dense']:.2f} of the best turns, "
                f"{statistics.median(ratios):.2f} in the median",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "int8")
