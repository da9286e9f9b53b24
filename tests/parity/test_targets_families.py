"""Graphs of other targets compute what transformers computes, for every family: in one piece, in chunks, step
by step.

They run on the CPU's provider, which has kernels for all of them; that their own providers compute the same
is not shown.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llorch_serve.artifact.manifest import Target
from llorch_serve.runtime.fixed_session import FixedSession
from support.builders.arch_rows import HF, usual_first
from support.builders.checkpoints import tiny_llama_config, write_hf_folder
from support.builders.tiny_exports import Logits, export_tiny, open_fixed_tiny, open_tiny, random_ids
from support.oracles.stepwise import check_steps, reference
from tolerances import FP32_LOGITS

TOKENS = 128
DYNAMIC: tuple[Target, ...] = ("portable", "directml")


# Other targets refuse them.
WITHOUT_EXPERTS = [name for name, row in HF.items() if not tiny_llama_config(**row).experts]


@pytest.mark.reference
@pytest.mark.parametrize(
    "name", usual_first(WITHOUT_EXPERTS, only=("gemma2", "gemma3, pattern", "hunyuan", "apertus"))
)
def test_every_family_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "model", HF[name])
    ids = random_ids(TOKENS)
    expected = reference(folder, ids)
    for target in DYNAMIC:
        session = open_tiny(export_tiny(folder, tmp_path / target, target=target))
        full = session.prefill(1, ids, 0, range(TOKENS))
        np.testing.assert_allclose(full, expected, atol=FP32_LOGITS, rtol=0, err_msg=target)
        check_steps(session, ids, expected, FP32_LOGITS)
    fixed = export_tiny(folder, tmp_path / "coreml", target="coreml", max_context=TOKENS)
    check_fixed(open_fixed_tiny(fixed), ids, expected, FP32_LOGITS)


def check_fixed(session: FixedSession, ids: list[int], expected: Logits, tolerance: float) -> None:
    """A prefill and a chunk after it, each padded to the size of their graph, then token by token to the last
    position.
    """
    for start, stop, wanted in ((0, 20, (4, 19)), (20, 50, (0, 29))):
        found = session.prefill(1, ids[start:stop], start, wanted)
        np.testing.assert_allclose(found, expected[[start + row for row in wanted]], atol=tolerance, rtol=0)
    found = session.verify(1, ids[50:], 50)
    np.testing.assert_allclose(found, expected[50:], atol=tolerance, rtol=0)
