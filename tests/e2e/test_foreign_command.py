"""The commands on folders that other tools made: they answer, and say what is not possible."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.builders.foreign_folders import greedy, write_genai_folder, write_optimum_folder
from support.harness.processes import llorch, llorch_here, serving

PROMPT = (9, 8, 7)
ASKED = ("--prompt-ids", ",".join(map(str, PROMPT)), "--temperature", "0", "--ignore-eos", "--json")
KINDS = {"onnxruntime-genai": write_genai_folder, "optimum": write_optimum_folder}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return KINDS[kind](tmp_path_factory.mktemp("foreign") / "model")


def test_generate_answers_and_names_the_limits(kind, folder):
    outcome = llorch("generate", folder, *ASKED, "--max-tokens", "10")
    assert outcome.document()["token_ids"] == greedy(PROMPT, 10)
    assert f"note: made by {kind}" in outcome.stderr
    assert ("no batching" in outcome.stderr, "no chunked prefill" in outcome.stderr) == (
        kind == "optimum",
    ) * 2


def test_chat_goes_through_the_folders_template(folder):
    chat = llorch_here("generate", folder, "--chat", "Hello", "--max-tokens", "3", "--json").document()
    plain = llorch_here("generate", folder, "--prompt", "Hello", "--max-tokens", "3", "--json").document()
    assert chat["prompt_tokens"] > plain["prompt_tokens"]


def test_serve_answers_several_at_once_and_describes_itself(kind, folder):
    prompts = [(5,), PROMPT, tuple(range(100, 130)), (300, 2, 2)]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    with serving(folder, "--slots", "2") as worker, WorkerClient(worker.address) as client:

        def ask(prompt):
            request = GenerationRequest(str(prompt[0]), TokenPrompt(prompt), sampling)
            return [token for update in client.generate(request) for token in update.token_ids]

        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(ask, prompts)) == [greedy(prompt, 8) for prompt in prompts]
        info = client.model_info()
        assert (info.kind, info.precision, info.model_id) == (kind, "unstated", "model")
        assert info.batch_invariant == (kind == "optimum")
        assert any("no batching" in limit for limit in info.limits) == (kind == "optimum")
        assert (info.slots, info.provider_node_share) == (2, 1.0)
        assert any("made by" in line and kind in line for line in worker.command.log)


def test_reuse_and_guesses_work_where_the_cache_allows_and_are_refused_where_not(kind, folder):
    repeating = tuple(20 + i % 5 for i in range(40))
    ids = ",".join(map(str, repeating))
    flags = ("--prompt-ids", ids, "--temperature", "0", "--ignore-eos", "--max-tokens", "20", "--json")
    guessed = llorch_here("generate", folder, *flags, "--lookup", "4")
    if kind == "optimum":
        assert guessed.code == 2
        assert "--lookup 4 has no effect on the graph" in guessed.stderr
        for given in (("--strict-reuse",), ("--kv-cache-memory", "1GiB"), ("--prefill-chunk", "64")):
            outcome = llorch_here("serve", folder, "--port", "0", *given)
            assert outcome.code == 2
            assert f"{given[0]} has no effect on" in outcome.stderr
        return
    assert guessed.document()["token_ids"] == greedy(repeating, 20)
    assert guessed.document()["drafted_tokens"] > 0
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with serving(folder) as worker, WorkerClient(worker.address) as client:
        for name, cached in (("a", 0), ("b", len(repeating) - 2)):
            updates = list(client.generate(GenerationRequest(name, TokenPrompt(repeating), sampling)))
            assert [token for update in updates for token in update.token_ids] == greedy(repeating, 4)
            assert updates[-1].completion.cached_tokens == cached


def test_bench_reports_the_kind(kind, folder):
    quick = ("--prompt-tokens", "20", "--max-tokens", "4", "--repeat", "1", "--streams", "1,2")
    (entry,) = llorch_here("bench", folder, *quick, "--json").document()["entries"]
    assert entry["model"]["kind"] == kind
    assert any("no batching" in limit for limit in entry["model"]["limits"]) == (kind == "optimum")
    assert f"made by {kind}" in llorch_here("bench", folder, *quick).stdout.splitlines()[1]


def test_a_reference_is_for_our_own_artifacts(kind, folder, tmp_path):
    outcome = llorch_here("bench", folder, "--reference", tmp_path / "file")
    assert (outcome.code, kind in outcome.error()) == (2, True)


def test_a_folder_that_is_refused_ends_with_the_artifacts_code(tmp_path):
    folder = write_optimum_folder(tmp_path / "model")
    (folder / "model.onnx").rename(folder / "decoder_model_merged.onnx")
    outcome = llorch_here("generate", folder, "--prompt", "a")
    assert (outcome.code, "optimum-cli export onnx" in outcome.error()) == (3, True)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["LLORCH_TEST_GENAI_FOLDER", "LLORCH_TEST_OPTIMUM_FOLDER"])
def test_a_folder_that_the_tool_itself_made_answers_the_paris_question(variable):
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} does not name an export of SmolLM2-135M-Instruct by that tool")
    flags = ("--temperature", "0", "--max-tokens", "24", "--json")
    outcome = llorch("generate", Path(value), "--chat", "What is the capital of France?", *flags)
    assert "Paris" in json.loads(outcome.stdout)["text"]
