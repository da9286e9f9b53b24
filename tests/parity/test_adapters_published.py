"""Published adapter_config.json files are read, as they are, as PEFT reads them: modules and scaling."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.adapter.apply import with_adapters
from llorch_export.adapter.choice import AdapterChoice
from llorch_export.checkpoint.base import Checkpoint
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import ArtifactError
from support.builders.adapters import write_adapter
from support.builders.checkpoints import tiny_llama_config, write_hf_folder
from support.oracles.peft_adapters import base_model, draw, merged_weights

pytestmark = pytest.mark.reference

DATA = Path(__file__).resolve().parents[1] / "data" / "published" / "adapters.jsonl"
PUBLISHED: dict[str, dict[str, Any]] = {
    row["name"]: row["config"] for row in map(json.loads, DATA.read_text(encoding="utf-8").splitlines())
}
# What is no adapter of a model here, and why; PEFT refuses to put these on a Llama too.
REFUSED = {
    **{
        name: "is a fully trained model"
        for name, config in PUBLISHED.items()
        if config["peft_type"] == "full"
    },
    "adapter-32": "against the config, adapters for",  # of a model that holds a language model as ``llm``
    "adapter-36": "against the config, adapters for",  # of Falcon
    "adapter-37": "against the config, adapters for",  # of Falcon
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("published") / "model", {"num_hidden_layers": 1})


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return base_model(folder)


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - REFUSED.keys()))
def test_a_published_adapter_is_merged_as_peft_merges_it(
    tmp_path: Path, checkpoint: Checkpoint, model: Any, name: str
) -> None:
    import peft

    config = PUBLISHED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = peft.PeftConfig.from_peft_type(**config)
        adapted = peft.get_peft_model(copy.deepcopy(model), read)
        draw(adapted, seed=0)
        adapted.float().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = with_adapters(checkpoint, (AdapterChoice(tmp_path),))
    for key, value in merged_weights(adapted.double()).items():
        np.testing.assert_array_almost_equal_nulp(found.tensors[key].load(), value.astype(np.float32), 1)
    trained_on = config["base_model_name_or_path"]
    assert (trained_on in (None, "local")) is (not any("trained on" in n for n in found.adapters[0].notices))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_none_of_this_model_is_refused(tmp_path: Path, checkpoint: Checkpoint, name: str) -> None:
    write_adapter(tmp_path / "lora", tiny_llama_config(num_hidden_layers=1))
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(PUBLISHED[name]))
    with pytest.raises(ArtifactError, match=REFUSED[name]):
        with_adapters(checkpoint, (AdapterChoice(tmp_path / "lora"),))
