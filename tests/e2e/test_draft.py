"""A draft model through the commands and a worker process: the same tokens, sooner or not, and its counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import llorch
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.builders.checkpoints import write_hf_folder
from support.builders.signing_keys import write_keys
from support.harness.processes import llorch_here, serving

PROMPT = ("--prompt-ids", ",".join(str(100 + i % 40) for i in range(30)))
FLAGS = (*PROMPT, "--max-tokens", "60", "--ignore-eos", "--json")
SAMPLINGS = {"greedy": ("--temperature", "0"), "sampled": ("--temperature", "0.9", "--seed", "3")}


@pytest.fixture(scope="module")
def model(
    tiny_source: Path, export_here: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """In float32, so that no rounding of activations makes a tie of what is none."""
    return export_here(tiny_source, tmp_path_factory.mktemp("draft") / "model", "--precision", "fp32")


@pytest.fixture(scope="module")
def smaller(export_here: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, of one layer."""
    folder = tmp_path_factory.mktemp("smaller")
    source = write_hf_folder(folder / "source", {"num_hidden_layers": 1}, seed=5)
    return export_here(source, folder / "artifact", "--precision", "int4", "--block-size", "32")


@pytest.mark.parametrize("how", SAMPLINGS)
def test_a_command_answers_as_without_a_draft_and_says_what_was_guessed(
    model: Path, smaller: Path, how: str
) -> None:
    plain = llorch_here("generate", model, *FLAGS, *SAMPLINGS[how]).document()
    itself = llorch_here("generate", model, *FLAGS, *SAMPLINGS[how], "--draft", model).document()
    other = llorch_here("generate", model, *FLAGS, *SAMPLINGS[how], "--draft", smaller).document()
    assert plain["token_ids"] == itself["token_ids"] == other["token_ids"]
    assert plain["drafted_tokens"] == 0
    assert itself["drafted_tokens"] == itself["accepted_tokens"] > 0
    assert other["drafted_tokens"] > other["accepted_tokens"]


def test_several_answers_of_a_request_are_guessed_for(model: Path) -> None:
    flags = (*FLAGS, "--temperature", "0.9", "--seed", "3", "--n", "3")
    plain = llorch_here("generate", model, *flags).document()["answers"]
    guessed = llorch_here("generate", model, *flags, "--draft", model).document()["answers"]
    assert [each["token_ids"] for each in plain] == [each["token_ids"] for each in guessed]
    assert sum(each["drafted_tokens"] for each in guessed) > 0


def test_streams_that_come_and_go_get_their_own_answers(model: Path, smaller: Path) -> None:
    def request(index: int, tokens: int) -> GenerationRequest:
        prompt = TokenPrompt(tuple(100 + (index + i) % 40 for i in range(20 + index)))
        sampling = SamplingParams(
            temperature=index % 2, seed=index, max_tokens=tokens, repetition_penalty=1, ignore_eos=True
        )
        return GenerationRequest(f"r{index}-{tokens}", prompt, sampling)

    def ask(client: WorkerClient, index: int) -> list[int]:
        if index % 3 == 2:  # leaves after its first tokens
            with closing(client.generate(request(index, 90))) as updates:
                next(updates)
            return []
        return [token for update in client.generate(request(index, 40)) for token in update.token_ids]

    with serving(model, "--slots", "4") as worker, WorkerClient(worker.address) as client:
        wanted = [ask(client, index) for index in range(9)]
    for draft in (model, smaller):
        flags = ("--slots", "4", "--draft", draft)
        with serving(model, *flags) as worker, WorkerClient(worker.address) as client:
            with ThreadPoolExecutor(9) as threads:
                assert list(threads.map(lambda index: ask(client, index), range(9))) == wanted
            load = client.load()
            assert load.drafted_tokens >= load.accepted_tokens
            assert load.drafted_tokens > 0
            for _ in range(2):
                again = list(client.generate(request(1, 40)))
                assert [token for update in again for token in update.token_ids] == wanted[1]
            assert again[-1].completion is not None
            assert again[-1].completion.cached_tokens > 0
            assert not client.model_info().batch_invariant


def test_python_takes_a_draft(model: Path, smaller: Path) -> None:
    with (
        llorch.load(model, draft=str(smaller), threads=1) as guessing,
        llorch.load(model, threads=1) as plain,
    ):
        asked = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
        guessed, wanted = guessing.generate("The", **asked), plain.generate("The", **asked)
    assert guessed.token_ids == wanted.token_ids
    assert guessed.drafted_tokens > guessed.accepted_tokens
    assert wanted.drafted_tokens == 0


@pytest.mark.parametrize("command", ["serve", "generate", "batch"])
@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--lookup", "4"), "--draft does not go with --lookup"),
        (("--batch-invariant",), "--batch-invariant does not go with --draft"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    model: Path, tmp_path: Path, command: str, flags: tuple[str, ...], found: str
) -> None:
    own: tuple[object, ...] = (model, "--port", "0")
    if command == "generate":
        own = (model, *PROMPT)
    if command == "batch":
        (tmp_path / "in").write_text('{"prompt": "a"}\n')
        own = (tmp_path / "in", tmp_path / "out", model)
    outcome = llorch_here(command, *own, "--draft", model, *flags)
    assert outcome.code == 2
    assert found in outcome.error()


def test_a_draft_without_a_cache_is_refused(model: Path) -> None:
    outcome = llorch_here("generate", model, *PROMPT, "--draft", model, "--no-kv-cache")
    assert outcome.code == 2
    assert "--draft has no effect with --no-kv-cache" in outcome.error()


def test_a_folder_that_is_no_draft_is_refused(model: Path, tiny_staged: Path, tmp_path: Path) -> None:
    outcome = llorch_here("generate", model, *PROMPT, "--draft", tiny_staged)
    assert (outcome.code, "which is cut into 2 stages" in outcome.error()) == (2, True)
    outcome = llorch_here("generate", model, *PROMPT, "--draft", tmp_path / "nowhere")
    assert (outcome.code, "nowhere" in outcome.error()) == (3, True)


def test_a_running_worker_has_its_own(model: Path) -> None:
    outcome = llorch_here("generate", "--connect", "127.0.0.1:1", *PROMPT, "--draft", model)
    assert outcome.code == 2
    assert "--draft" in outcome.error()


def test_a_signature_is_asked_of_the_draft_too(model: Path, smaller: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "k")
    signed, draft = tmp_path / "signed", tmp_path / "draft"
    for folder, origin in ((signed, model), (draft, smaller)):
        shutil.copytree(origin, folder)
    assert llorch_here("sign", signed, "--private-key", keys.private).code == 0
    flags = ("generate", signed, *PROMPT, "--draft", draft, "--verify-signature", keys.public)
    outcome = llorch_here(*flags)
    assert (outcome.code, str(draft) in outcome.error()) == (3, True), outcome
    assert llorch_here("sign", draft, "--private-key", keys.private).code == 0
    assert llorch_here(*flags).code == 0


def test_lines_say_which_draft_they_were_answered_with(model: Path, smaller: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "a", "max_tokens": 4}\n')
    flags = (tmp_path / "in", tmp_path / "out", model, "--temperature", "0")
    assert llorch_here("batch", *flags, "--draft", smaller).code == 0
    assert llorch_here("batch", *flags, "--draft", smaller).code == 0
    assert llorch_here("batch", *flags, "--draft", model).code != 0


@pytest.mark.real_model
def test_a_real_model_is_right_about_itself(smollm2: Callable[..., Path]) -> None:
    artifact = smollm2("fp32")
    flags = ("--prompt", "The history of Paris begins", "--max-tokens", "48", "--temperature", "0", "--json")
    plain = llorch_here("generate", artifact, *flags).document()
    guessed = llorch_here("generate", artifact, *flags, "--draft", artifact).document()
    assert guessed["token_ids"] == plain["token_ids"]
    assert guessed["accepted_tokens"] > 0
