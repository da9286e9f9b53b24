"""LiteLLM as a library."""

from __future__ import annotations

import os
from functools import partial

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its price list is not fetched

import litellm
from litellm_calls import show
from shown import KEY, REAL, SCRIPTED, Served


def completing(served: Served) -> partial:
    return partial(
        litellm.completion, model=f"openai/{served.model}", api_base=served.url, api_key=KEY, max_retries=0
    )


show(completing(REAL), completing(SCRIPTED))
