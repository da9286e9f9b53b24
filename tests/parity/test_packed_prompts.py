"""A second graph for prompts beside codes that are kept, and what is said of both graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.options import ExportOptions, Rule
from llorch_export.pipeline import export
from llorch_export.preview import preview
from llorch_serve.config import SessionConfig
from llorch_serve.errors import UsageError
from llorch_serve.fidelity.divergence import DivergenceSum
from llorch_serve.runtime.opening import open_session
from support.builders.arch_rows import HF
from support.builders.checkpoints import write_hf_folder
from support.builders.packed_checkpoints import write_gptq
from support.builders.tiny_exports import random_ids, silent
from support.oracles import numpy_llama
from tolerances import KL_ROW_TINY, QUANTISED_LOGITS_LEVEL_0

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
ROWS = ExportOptions(
    "",
    Path(),
    precision="int8",
    activations="row",
    rules=(Rule(("*.mlp.down_proj",), activations="block"),),
    kv_dtype="float32",
)
SOURCE: dict[str, Any] = {"precision": "source", "kv_dtype": "float32", "accuracy_level": 0}
IDS = random_ids(40)


def test_answers_keep_the_codes_and_prompts_have_their_own_recipe(tmp_path: Path) -> None:
    packed = write_gptq(tmp_path / "m", SHAPE, order=True)
    options = ExportOptions(str(packed.folder), tmp_path / "a", prompts=ROWS, **SOURCE)
    result = export(options, silent)
    expected = numpy_llama.forward(packed.config, packed.values, IDS).astype(np.float32)

    def logits(*, single_graph: bool) -> Any:
        config = SessionConfig(threads=1, slots=2, single_graph=single_graph)
        session = open_session(result.artifact, config, lambda _report: None)
        return session.prefill(0, IDS, 0, range(len(IDS))).copy()

    np.testing.assert_allclose(logits(single_graph=True), expected, atol=QUANTISED_LOGITS_LEVEL_0, rtol=0)
    prompts = DivergenceSum()
    prompts.add(expected, logits(single_graph=False))
    assert 0 < prompts.result().kl < KL_ROW_TINY
    (said,) = [notice for notice in result.notices if notice.startswith("matrices as the graph has them")]
    assert said.endswith("; the graph for prompts has them anew, by its own recipe")
    described = preview(options)
    assert described["prompt_data_bytes"] == (tmp_path / "a" / "prompts.onnx.data").stat().st_size
    assert said in list(described["notices"])  # type: ignore[call-overload]


@pytest.mark.parametrize("packed", [True, False])
def test_prompts_alone_cannot_keep_the_codes(tmp_path: Path, packed: bool) -> None:
    """Whether there are codes, and whether adapters or transforms have changed them, is settled once."""
    source = write_gptq(tmp_path / "m", SHAPE).folder if packed else write_hf_folder(tmp_path / "m", SHAPE)
    own = ExportOptions("", Path(), precision="source", kv_dtype="float32")
    options = ExportOptions(str(source), tmp_path / "a", precision="int8", kv_dtype="float32", prompts=own)
    for run in (preview, lambda o: export(o, silent)):
        with pytest.raises(
            UsageError, match=r"--prefill-recipe has precision source.*int8.*--precision source"
        ):
            run(options)
    assert not (tmp_path / "a").exists()


def test_what_the_graph_for_prompts_needs_and_says_is_kept(tmp_path: Path) -> None:
    source = write_hf_folder(tmp_path / "m", HF["qwen3_moe"])
    own = ExportOptions("", Path(), precision="int8", block_size=128, kv_dtype="float32")
    options = ExportOptions(str(source), tmp_path / "a", precision="fp32", prompts=own)
    found = export(options, silent)
    said = "experts are stored in blocks of 32, which divide their sizes"
    assert said in found.notices
    assert said in list(preview(options)["notices"])  # type: ignore[call-overload]
    assert found.artifact.manifest.min_onnxruntime == "1.31"  # of experts in blocks, which prompts alone have
