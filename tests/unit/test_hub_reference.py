"""A repository, its revision and what is chosen of it are read from one word."""

from __future__ import annotations

import pytest

from llorch_export.source.gguf_choice import choose, quantisation
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.hub.reference import Reference, parse_reference, with_revision


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", Reference("org/name")),
        ("org/name@v1.0", Reference("org/name", "v1.0")),
        ("org/name@refs/pr/3", Reference("org/name", "refs/pr/3")),
        ("org/name:Q4_K_M", Reference("org/name", None, "Q4_K_M")),
        (
            "org/name@main:sub/a-00001-of-00002.gguf",
            Reference("org/name", "main", "sub/a-00001-of-00002.gguf"),
        ),
        ("name", None),
        ("org/../name", None),
        ("org/name@", None),
        ("org/name:", None),
        ("org/name@../x", None),
        ("org/model.gguf", None),
        ("/org/name", None),
        ("https://huggingface.co/org/name", None),
    ],
)
def test_a_reference_is_read(text: str, expected: Reference | None) -> None:
    assert parse_reference(text) == expected
    if expected is not None:
        assert str(expected) == text


def test_the_flag_says_the_revision() -> None:
    assert with_revision("org/name", None) == "org/name"
    assert with_revision("org/name:Q8_0", "v2") == "org/name@v2:Q8_0"
    assert with_revision("org/name@v2", "v2") == "org/name@v2"


@pytest.mark.parametrize(
    ("source", "revision", "found"),
    [
        ("./folder", "v2", "is for a hub id"),
        ("org/name@v1", "v2", "name two revisions"),
        ("org/name", "a b", "is no name of a branch"),
        ("org/name", "..", "is no name of a branch"),
    ],
)
def test_a_revision_that_has_no_meaning_is_refused(source: str, revision: str, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        with_revision(source, revision)


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("tinyllama-1.1b-chat-v1.0.Q5_0.gguf", "Q5_0"),
        ("qwen2.5-0.5b-instruct-fp16.gguf", "FP16"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("SmolLM2-135M-Instruct-IQ4_NL.gguf", "IQ4_NL"),
        ("Qwen3-0.6B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("BF16/Llama-3.3-70B-Instruct-BF16-00001-of-00003.gguf", "BF16"),
        ("smollm2.gguf", None),
    ],
)
def test_names_tell_quantisations(path: str, label: str | None) -> None:
    assert quantisation(path) == label


FILES = {
    "m-Q4_K_M.gguf": 800_000_000,
    "m-Q8_0.gguf": 1_300_000_000,
    "F16/m-F16-00001-of-00002.gguf": 2_000_000_000,
    "F16/m-F16-00002-of-00002.gguf": 500_000_000,
    "mmproj-m-F16.gguf": 1,
}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("q4_k_m", ("m-Q4_K_M.gguf",)),
        ("m-Q8_0.gguf", ("m-Q8_0.gguf",)),
        ("F16", ("F16/m-F16-00001-of-00002.gguf", "F16/m-F16-00002-of-00002.gguf")),
        ("F16/m-F16-00002-of-00002.gguf", ("F16/m-F16-00001-of-00002.gguf", "F16/m-F16-00002-of-00002.gguf")),
    ],
)
def test_a_file_is_chosen_with_all_its_parts(choice: str, expected: tuple[str, ...]) -> None:
    assert choose(FILES, choice, "org/m") == expected


def test_the_only_model_needs_no_choice() -> None:
    assert choose({"a.gguf": None, "mmproj-a.gguf": None}, None, "org/m") == ("a.gguf",)


def test_a_choice_is_listed_with_sizes() -> None:
    with pytest.raises(ArtifactError) as caught:
        choose(FILES, None, "org/m")
    assert str(caught.value) == (
        "org/m has 3 GGUF models: F16 (2.5 GB), Q4_K_M (800 MB), Q8_0 (1.3 GB); choose one as in org/m:F16"
    )
    with pytest.raises(ArtifactError, match=r"has no GGUF model Q2_K; it has F16 .*, Q8_0"):
        choose(FILES, "Q2_K", "org/m")


def test_two_models_of_one_quantisation_are_told_apart_by_path() -> None:
    files = {"a-Q8_0.gguf": 1, "b-Q8_0.gguf": 2}
    with pytest.raises(ArtifactError, match=r"2 GGUF models that Q8_0 names: a-Q8_0.gguf, b-Q8_0.gguf"):
        choose(files, "Q8_0", "org/m")
    with pytest.raises(ArtifactError, match=r"a-Q8_0.gguf \(1 MB\)"):
        choose(files, None, "org/m")


def test_a_part_that_is_missing_is_named() -> None:
    with pytest.raises(ArtifactError, match=r"parts 2 of .*, expected all of 1 to 2"):
        choose({"m-F16-00002-of-00002.gguf": 1}, None, "org/m")
