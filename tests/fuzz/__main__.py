"""Run one target under coverage-guided mutation: ``python -m fuzz TARGET --seconds N --found FOLDER``.

New inputs go to a folder beside ``--found``; one that breaks the target is kept in ``--found``, and ends the
run with another status than 0. Needs atheris (Linux), which is libFuzzer; ``ci/fuzz`` installs it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

from fuzz import limits, mutation


def main() -> None:
    """Parse the arguments and fuzz."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--found", type=Path, default=Path(".cache/fuzz"))
    asked = parser.parse_args()
    with atheris.instrument_imports(include=["llorch_serve", "llorch_export", "jinja2", "tomllib"]):
        from fuzz import targets
    target = targets.TARGETS[asked.target]
    run = limits.timed(targets.runner(asked.target))
    corpus = asked.found / "corpus" / asked.target
    corpus.mkdir(parents=True, exist_ok=True)
    kept = targets.CORPUS / asked.target

    def json_mutator(data: bytes, max_size: int, seed: int) -> bytes:
        found = mutation.mutate(data, seed) if seed % 4 else None
        return atheris.Mutate(data, max_size) if found is None else found[:max_size]

    arguments = [
        "fuzz",
        str(corpus),
        str(kept),
        f"-max_total_time={asked.seconds}",
        f"-artifact_prefix={asked.found}/{asked.target}-",
        f"-rss_limit_mb={limits.MEMORY_MIB}",
        f"-malloc_limit_mb={limits.MEMORY_MIB}",
        "-timeout=60",  # of a hang that never ends; what is only slow is judged by its processor time
        "-max_len=65536",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    atheris.Setup(arguments, run, custom_mutator=json_mutator if target.json else None)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
