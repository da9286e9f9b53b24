"""Whether this machine has an NVIDIA GPU, for scripts that measure on one.

``python -m bench_peers.card SCRIPT`` prints nothing where there is one, and else ends with a line and exit
code 4.
"""

from __future__ import annotations

import sys

from llorch_serve.errors import LlorchError, ProviderError
from llorch_serve.providers.nvidia import Gpu, list_gpus, load_nvml
from llorch_serve.terminal.console import fail


def require_card(script: str, gpus: tuple[Gpu, ...] | None = None) -> Gpu:
    """Return the first GPU. gpus: of this machine; None: NVIDIA's driver is asked.

    Raises ProviderError if there is none.
    """
    found = list_gpus(load_nvml()) if gpus is None else gpus
    if not found:
        raise ProviderError(
            f"{script} needs an NVIDIA GPU, and NVIDIA's driver lists none here; run it on a machine that "
            "has one"
        )
    return found[0]


if __name__ == "__main__":
    try:
        require_card(sys.argv[1])
    except LlorchError as error:
        sys.exit(fail(str(error), error.exit_code))
