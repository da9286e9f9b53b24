"""Whether this machine has an NVIDIA GPU, for scripts that measure on one.

``python -m bench_peers.card SCRIPT`` prints nothing where there is one, and else ends with a line and exit
code 4.
"""

from __future__ import annotations

import sys

from bench_peers.cli import exit_if_refused
from llorch_serve.errors import ProviderError
from llorch_serve.providers.nvidia import Gpu, list_gpus, load_nvml


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
    exit_if_refused(lambda: require_card(sys.argv[1]))
