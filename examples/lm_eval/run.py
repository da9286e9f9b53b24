"""lm-eval's own command line, with the model ``llorch`` and the tasks of this folder beside its own."""

from __future__ import annotations

import sys
from pathlib import Path

import llorch_lm  # noqa: F401 - registers the model
from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    sys.argv[1:1] = ["run", "--include_path", str(Path(__file__).parent)]
    cli_evaluate()
