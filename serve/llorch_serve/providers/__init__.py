"""Execution providers: the table of them, the runtime that brings them, and where a graph's nodes really
run.
"""

from llorch_serve.providers.choose import ActiveProvider, ProviderChoice, activate, require_unrecorded
from llorch_serve.providers.fitting import check_target, require_arithmetic
from llorch_serve.providers.placement import Placement, ProviderShare, averaged, placement
from llorch_serve.providers.runtime import (
    EXACT_BYTES,
    allowed_cores,
    byte_settings,
    import_runtime,
    require_exact_bytes,
    takes_no_rows,
    usable_cpus,
)
from llorch_serve.providers.table import ARITHMETIC, CPU, PROVIDERS, RUNS, Arithmetic, Memory, Provider

__all__ = [
    "ARITHMETIC",
    "CPU",
    "EXACT_BYTES",
    "PROVIDERS",
    "RUNS",
    "ActiveProvider",
    "Arithmetic",
    "Memory",
    "Placement",
    "Provider",
    "ProviderChoice",
    "ProviderShare",
    "activate",
    "allowed_cores",
    "averaged",
    "byte_settings",
    "check_target",
    "import_runtime",
    "placement",
    "require_arithmetic",
    "require_exact_bytes",
    "require_unrecorded",
    "takes_no_rows",
    "usable_cpus",
]
