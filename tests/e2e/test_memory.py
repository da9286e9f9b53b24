"""A worker's memory over 2,000 requests of random lengths: buffers follow shapes, and must not pile up with
them.
"""

from __future__ import annotations

import pytest

from measure.many_requests import random_request, resident_memory
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny
from support.harness.processes import serving

ROOM = 4 * 2**20  # beyond the first 200 requests; 4 KiB kept by each request would be 7 MiB


@pytest.mark.parametrize("flags", [(), ("--lookup", 4), ("--draft",)], ids=["plain", "lookup", "draft"])
def test_memory_is_flat_after_the_first_two_hundred_requests(tmp_path, flags):
    artifact = export_tiny(write_hf_folder(tmp_path / "source"), tmp_path / "artifact").folder
    if flags == ("--draft",):
        flags = ("--draft", artifact)
    with serving(artifact, "--slots", 4, *flags) as worker:
        first, *later = resident_memory(
            worker.address,
            worker.command.process.pid,
            lambda index: random_request(index, vocabulary=512, longest_prompt=100, longest_answer=27),
        )
    assert max(later) <= first + ROOM, [first, *later]
