"""Settings with which answers are the same bits whatever runs beside them and ran before them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.loading.repeatable import repeatable
from llorch_serve.providers import ProviderChoice
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny

USUAL = EngineConfig()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts in int8 and int4, each with a graph for a cache in int8, and one that embeds."""
    folder = tmp_path_factory.mktemp("repeatable")
    source = write_hf_folder(folder / "source")
    for precision in ("int8", "int4"):
        export_tiny(source, folder / precision, precision=precision, kv_dtype="int8")
    export_tiny(source, folder / "embeds", embed="mean")
    return {name: folder / name for name in ("int8", "int4", "embeds")}


def test_only_what_prefill_computed_is_reused_from_a_cache_that_rounds_nothing(folders):
    found = repeatable(USUAL, folders["int8"])
    assert found == replace(USUAL, strict_reuse=True, session=SessionConfig(kv_dtype="float32"))


def test_a_cache_in_int8_that_was_asked_for_is_not_reused(folders):
    asked = replace(USUAL, session=SessionConfig(kv_dtype="int8"))
    assert repeatable(asked, folders["int8"]) == replace(asked, prefix_cache=False)


def test_without_reuse_the_cache_may_round(folders):
    asked = replace(USUAL, prefix_cache=False)
    assert repeatable(asked, folders["int8"]) == asked


def test_four_bits_are_multiplied_by_even_numbers_of_rows(folders):
    assert repeatable(USUAL, folders["int4"]).session.batch_invariant
    # What does not go together is left as it was asked for, and told where the model is loaded.
    assert not repeatable(replace(USUAL, lookup=4), folders["int4"]).session.batch_invariant
    elsewhere = replace(USUAL, session=SessionConfig(provider=ProviderChoice("cuda")))
    assert not repeatable(elsewhere, folders["int4"]).session.batch_invariant


def test_what_has_no_cache_stays_as_it_is(folders):
    assert repeatable(USUAL, folders["embeds"]) == USUAL
