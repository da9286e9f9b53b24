"""``llorch generate`` on tiny models: every flag has an effect or is refused, and stdout carries the answer
only.
"""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from tokenizers import Tokenizer

from llorch_serve.terminal import opening
from support.builders.checkpoints import BOS_ID, write_hf_folder
from support.harness.processes import llorch, llorch_here, running, serving

PROMPT = ("--prompt", "Water boils at")
GREEDY = ("--temperature", "0")


def answer(model, *flags, **variables):
    prompt = () if "--chat" in flags or "--prompt-ids" in flags or "--prompt" in flags else PROMPT
    return llorch_here("generate", model, *prompt, "--json", *flags, **variables).document()


@pytest.fixture(scope="module")
def greedy(tiny):
    """24 greedy tokens of the tiny model, no two of the first ten alike."""
    found = answer(tiny, *GREEDY, "--max-tokens", "24")["token_ids"]
    assert len(set(found[:10])) == 10
    return found


@pytest.fixture(scope="module")
def stopping(greedy, tmp_path_factory, export_here):
    """The tiny model, with the fourth greedy token as its end of sequence."""
    folder = tmp_path_factory.mktemp("stopping")
    return export_here(write_hf_folder(folder / "source", {"eos_token_id": greedy[3]}), folder / "artifact")


# Output.


def test_json_is_one_document_on_stdout(tiny):
    outcome = llorch("generate", tiny, *PROMPT, "--max-tokens", "5", "--seed", "3", "--json")
    document = outcome.document()
    assert {"text", "token_ids", "finish_reason", "prompt_tokens", "seed", "timings"} <= document.keys()
    assert set(document["timings"]) == {"queue_s", "prefill_s", "decode_s"}
    assert min(document["timings"].values()) >= 0
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert document["text"] == tokenizer.decode(document["token_ids"])
    assert (len(document["token_ids"]), document["finish_reason"], document["seed"]) == (5, "length", 3)
    assert document["prompt_tokens"] == len(tokenizer.encode(PROMPT[1]).ids)
    assert outcome.stderr == ""


def test_text_alone_goes_to_stdout_and_remarks_to_stderr(tiny):
    outcome = llorch("generate", tiny, *PROMPT, *GREEDY, "--max-tokens", "5")
    assert outcome.stdout == answer(tiny, *GREEDY, "--max-tokens", "5")["text"] + "\n"
    assert outcome.code == 0
    assert "5 tokens" in outcome.stderr


def test_an_answer_is_streamed_and_ctrl_c_ends_it(long):
    with running("generate", long, *PROMPT, "--max-tokens", "150000", "--ignore-eos") as command:
        assert command.stdout.read(1)  # while almost all of the answer is still to come
        command.process.send_signal(signal.SIGINT)
        command.stdout.read()
        assert command.wait() == 130
        assert command.log == ["interrupted"]


def test_a_reader_that_has_seen_enough_is_no_error(long):
    with running("generate", long, *PROMPT, "--max-tokens", "150000", "--ignore-eos") as command:
        command.stdout.read(1)
        command.stdout.close()
        assert command.wait() == 0
        assert command.log == []


# Models.


def test_the_model_may_be_named_three_ways(tiny, greedy, tmp_path):
    flags = (*PROMPT, *GREEDY, "--max-tokens", "24", "--json")
    for arguments, variables in (
        ((tiny,), {}),
        (("--model", tiny), {}),
        ((), {"MODEL_PATH": tiny}),
        ((tiny,), {"MODEL_PATH": tmp_path}),
        (("--model", tiny), {"MODEL_PATH": tmp_path}),
    ):
        document = llorch_here("generate", *arguments, *flags, **variables).document()
        assert document["token_ids"] == greedy, arguments


def test_two_different_models_or_none_are_refused(tiny, tmp_path):
    both = llorch_here("generate", tiny, "--model", tmp_path, *PROMPT)
    assert (both.code, str(tiny) in both.error(), str(tmp_path) in both.error()) == (2, True, True)
    none = llorch_here("generate", *PROMPT)
    assert (none.code, "MODEL_PATH" in none.error()) == (2, True)


@pytest.mark.parametrize("as_folder", [True, False])
def test_tokenizer_path_replaces_the_tokenizer(tiny, tmp_path, as_folder):
    data = json.loads((tiny / "tokenizer.json").read_text())
    data["post_processor"] = None  # no BOS any more
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    path = tmp_path if as_folder else tmp_path / "tokenizer.json"
    own, other = answer(tiny, *GREEDY), answer(tiny, *GREEDY, TOKENIZER_PATH=path)
    assert other["prompt_tokens"] == own["prompt_tokens"] - 1
    assert other["token_ids"] != own["token_ids"]


def test_a_tokenizer_path_that_leads_nowhere_is_an_error(tiny, tmp_path):
    outcome = llorch_here("generate", tiny, *PROMPT, TOKENIZER_PATH=tmp_path)
    assert outcome.code == 2
    assert str(tmp_path / "tokenizer.json") in outcome.error()


def test_a_source_is_exported_once(tiny_source, greedy, tmp_path):
    flags = ("generate", tiny_source, *PROMPT, *GREEDY, "--max-tokens", "24", "--json")
    first = llorch(*flags, LLORCH_CACHE=tmp_path)
    assert first.document()["token_ids"] == greedy
    (folder,) = tmp_path.iterdir()
    assert re.search(f"exported to {re.escape(str(folder))}", first.stderr)
    before = (folder / "llorch.json").stat().st_mtime_ns
    second = llorch(*flags, LLORCH_CACHE=tmp_path)
    assert second.document()["token_ids"] == greedy
    assert "exported to" not in second.stderr
    assert str(folder) in second.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]
    assert (folder / "llorch.json").stat().st_mtime_ns == before


def test_a_source_that_has_changed_is_exported_again(tmp_path):
    source, cache = tmp_path / "model", tmp_path / "cache"
    flags = ("generate", source, *PROMPT, *GREEDY, "--json")
    write_hf_folder(source)
    first = llorch(*flags, LLORCH_CACHE=cache).document()
    write_hf_folder(source, seed=1)
    second = llorch(*flags, LLORCH_CACHE=cache)
    assert second.document()["token_ids"] != first["token_ids"]
    assert "exported to" in second.stderr
    assert len(list(cache.iterdir())) == 1


def test_a_model_without_end_of_sequence_says_so_and_ends_at_max_tokens(tmp_path, export_here):
    source = write_hf_folder(
        tmp_path / "source", {"eos_token_id": None}, tokenizer_config={"eos_token": None}
    )
    artifact = export_here(source, tmp_path / "artifact")
    outcome = llorch("generate", artifact, *PROMPT, "--max-tokens", "30", "--json")
    assert "no end-of-sequence token" in outcome.stderr
    document = outcome.document()
    assert (len(document["token_ids"]), document["finish_reason"]) == (30, "length")


# Prompts.


def test_prompt_ids_are_used_as_they_are(tiny, greedy):
    ids = Tokenizer.from_file(str(tiny / "tokenizer.json")).encode(PROMPT[1]).ids
    assert ids[0] == BOS_ID
    document = answer(tiny, "--prompt-ids", ",".join(map(str, ids)), *GREEDY, "--max-tokens", "24")
    assert document["token_ids"] == greedy
    assert document["prompt_tokens"] == len(ids)


def test_prompt_ids_are_read_from_a_file_too(tiny, greedy, tmp_path):
    ids = Tokenizer.from_file(str(tiny / "tokenizer.json")).encode(PROMPT[1]).ids
    (path := tmp_path / "ids.json").write_text(json.dumps(ids))
    assert answer(tiny, "--prompt-ids", path, *GREEDY, "--max-tokens", "24")["token_ids"] == greedy


def test_chat_goes_through_the_template(tiny):
    chat = answer(tiny, "--chat", "Hello", *GREEDY)
    plain = answer(tiny, "--prompt", "Hello", *GREEDY)
    assert chat["prompt_tokens"] > plain["prompt_tokens"]
    assert chat["token_ids"] != plain["token_ids"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "--prompt, --chat, --prompt-ids"),
        (("--prompt", "a", "--chat", "b"), "--prompt and --chat"),
        (("--prompt-ids", "1,x"), "'1,x'"),
        (("--prompt-ids", ""), "empty prompt"),
        (("--prompt-ids", "512"), "0 to 511"),
        (("--prompt", "a", "--wait", "1"), "--wait"),
        (("--prompt", "a", "--max-context", "129"), "2 to 128"),
        (("--prompt", "a", "--temperature", "2.5", "--top-p", "0"), "top_p"),
        (("--prompt", "a", "--min-tokens", "9", "--max-tokens", "8"), "min_tokens"),
        (("--prompt", "a", "--seed", "-1"), "seed"),
        (("--prompt", "a", "--typical-p", "0"), "typical_p"),
        (("--prompt", "a", "--presence-penalty", "2.1"), "presence_penalty"),
        (("--prompt", "a", "--frequency-penalty", "nan"), "frequency_penalty"),
        (("--prompt", "a", "--repeat-last-n", "-2"), "repeat_last_n"),
        (("--prompt", "a", "--stop-token-id", "512"), "stop_token_ids[0]"),
        (("--prompt", "a", "--logit-bias", "512=1"), "logit_bias[512]"),
        (("--prompt", "a", "--logit-bias", "5=101"), "logit_bias[5]"),
        (("--prompt", "a", "--logit-bias", "5:1"), "'5:1'"),
        (("--prompt", "a", "--logit-bias", "5=1", "--logit-bias", "5=2"), "token 5 twice"),
        (("--prompt", "a", "--logprobs", "3"), "--json"),
        (("--prompt", "a", "--json", "--logprobs", "21"), "logprobs"),
    ],
)
def test_what_cannot_be_done_is_a_usage_error(tiny, flags, named):
    outcome = llorch_here("generate", tiny, *flags)
    assert outcome.code == 2
    assert named in outcome.error()


def test_every_bad_value_is_named_at_once(tiny):
    error = llorch_here(
        "generate", tiny, *PROMPT, "--temperature", "3", "--top-k", "-1", "--min-p", "2"
    ).error()
    assert all(name in error for name in ("temperature", "top_k", "min_p"))


# Sampling flags.


def test_max_tokens(tiny, greedy):
    assert answer(tiny, *GREEDY, "--max-tokens", "7")["token_ids"] == greedy[:7]
    assert answer(tiny, *GREEDY, "--max-tokens", "0")["token_ids"] == []


def test_the_model_stops_at_its_stop_token_unless_told_otherwise(stopping, greedy):
    stopped = answer(stopping, *GREEDY, "--max-tokens", "24")
    assert (stopped["token_ids"], stopped["finish_reason"]) == (greedy[:3], "stop")
    assert answer(stopping, *GREEDY, "--max-tokens", "24", "--ignore-eos")["token_ids"] == greedy


def test_min_tokens_puts_the_stop_token_off(stopping, greedy):
    found = answer(stopping, *GREEDY, "--max-tokens", "24", "--min-tokens", "6")["token_ids"]
    assert found[:3] == greedy[:3]
    assert len(found) >= 6
    assert greedy[3] not in found


def test_a_seed_repeats_an_answer_and_is_reported(tiny):
    flags = ("--temperature", "1", "--max-tokens", "24")
    first, again = answer(tiny, *flags, "--seed", "7"), answer(tiny, *flags, "--seed", "7")
    assert first["token_ids"] == again["token_ids"]
    assert answer(tiny, *flags, "--seed", "8")["token_ids"] != first["token_ids"]
    drawn = answer(tiny, *flags)
    assert answer(tiny, *flags, "--seed", str(drawn["seed"]))["token_ids"] == drawn["token_ids"]


def test_temperature_leaves_the_greedy_path(tiny, greedy):
    hot = answer(tiny, "--temperature", "1.5", "--seed", "1", "--max-tokens", "24")["token_ids"]
    assert hot != greedy


@pytest.mark.parametrize("flag", [("--top-k", "1"), ("--top-p", "0.0001"), ("--min-p", "1")])
def test_cutting_all_but_the_likeliest_token_is_greedy(tiny, greedy, flag):
    for seed in ("1", "2"):
        found = answer(tiny, "--temperature", "1.5", "--seed", seed, "--max-tokens", "24", *flag)
        assert found["token_ids"] == greedy


def test_repetition_penalty_changes_what_is_likeliest(tiny, greedy):
    assert len(set(greedy)) < len(greedy)
    found = answer(tiny, *GREEDY, "--max-tokens", "24", "--repetition-penalty", "2")["token_ids"]
    assert len(set(found)) > len(set(greedy))


def test_typical_p_keeps_one_token_whatever_the_seed(tiny):
    flags = ("--temperature", "1.5", "--typical-p", "0.000001", "--max-tokens", "8")
    assert (
        answer(tiny, *flags, "--seed", "1")["token_ids"] == answer(tiny, *flags, "--seed", "2")["token_ids"]
    )


def test_penalties_on_the_answer_make_it_more_varied(tiny, greedy):
    for flag in (("--presence-penalty", "2"), ("--frequency-penalty", "2")):
        found = answer(tiny, *GREEDY, "--max-tokens", "24", *flag)["token_ids"]
        assert len(set(found)) > len(set(greedy)), flag
        unseen = answer(tiny, *GREEDY, "--max-tokens", "24", *flag, "--repeat-last-n", "0")["token_ids"]
        assert unseen == greedy, flag


def test_a_bias_makes_a_token_certain_or_impossible(tiny, greedy):
    bias = ("--logit-bias", "99=100", "--logit-bias", f"{greedy[0]}=-100")
    assert answer(tiny, *GREEDY, "--max-tokens", "3", *bias)["token_ids"] == [99] * 3
    assert answer(tiny, *GREEDY, "--max-tokens", "3", *bias[2:])["token_ids"][0] != greedy[0]


def test_a_stop_token_of_ones_own_ends_the_answer(tiny, greedy):
    stop = ("--stop-token-id", str(greedy[5]), "--stop-token-id", str(greedy[2]))
    found = answer(tiny, *GREEDY, "--max-tokens", "24", *stop)
    assert (found["token_ids"], found["finish_reason"]) == (greedy[:2], "stop")


def test_special_tokens_are_shown_on_demand(tiny):
    wish = (*GREEDY, "--logit-bias", f"{BOS_ID}=100", "--max-tokens", "2")
    assert answer(tiny, *wish)["text"] == ""
    assert answer(tiny, *wish, "--keep-special-tokens")["text"] == "<|bos|><|bos|>"


def test_logprobs_stand_in_the_document(tiny, greedy):
    found = answer(tiny, *GREEDY, "--max-tokens", "4", "--logprobs", "2")
    assert "logprobs" not in answer(tiny, *GREEDY, "--max-tokens", "4")
    places = found["logprobs"]
    assert [place["token_id"] for place in places] == found["token_ids"] == greedy[:4]
    for place in places:
        assert place["top"][0] == {key: place[key] for key in ("token_id", "logprob", "text", "bytes")}
        assert len(place["top"]) == 2
        assert place["top"][1]["logprob"] <= place["logprob"] < 0
    assert (
        bytes(byte for place in places for byte in place["bytes"]).decode("utf-8", "replace") == found["text"]
    )


def test_stop_strings_end_the_answer_before_them(tiny):
    whole = answer(tiny, *GREEDY, "--max-tokens", "24")["text"]
    stop = whole[5:8]
    found = answer(tiny, *GREEDY, "--max-tokens", "24", "--stop", "never there", "--stop", stop)
    assert (found["text"], found["finish_reason"], found["stop_matched"]) == (
        whole[: whole.index(stop)],
        "stop",
        stop,
    )


def test_without_kv_cache_the_text_is_the_same(tiny, greedy):
    assert answer(tiny, *GREEDY, "--max-tokens", "24", "--no-kv-cache")["token_ids"] == greedy


def test_max_context_ends_the_answer(tiny):
    document = answer(tiny, *GREEDY, "--max-context", "20", "--max-tokens", "100")
    assert document["prompt_tokens"] + len(document["token_ids"]) == 20
    assert document["finish_reason"] == "length"


def test_threads_are_those_of_the_runtime(tiny, monkeypatch):
    used = []
    monkeypatch.setattr(opening, "report_load", lambda report: used.append(report.threads))
    answer(tiny, "--threads", "3")
    answer(tiny)
    assert used == [3, len(os.sched_getaffinity(0))]


# Against a worker.


def test_a_worker_gives_the_same_answer(tiny_worker, tiny, greedy):
    flags = (*PROMPT, *GREEDY, "--max-tokens", "24", "--json")
    remote = llorch_here("generate", "--connect", tiny_worker.address, *flags).document()
    local = llorch_here("generate", tiny, *flags).document()
    assert remote["token_ids"] == greedy
    assert remote.keys() == local.keys()
    for key in remote.keys() - {"seed", "timings"}:
        assert remote[key] == local[key]


def test_sampling_flags_reach_the_worker(tiny_worker, tiny):
    flags = (
        *PROMPT,
        "--temperature",
        "0.9",
        "--top-k",
        "20",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
        "--seed",
        "4",
    )
    flags += ("--typical-p", "0.9", "--presence-penalty", "0.3", "--frequency-penalty", "0.2")
    flags += ("--repeat-last-n", "9", "--logit-bias", "70=2", "--stop-token-id", "7", "--logprobs", "1")
    flags += (
        "--repetition-penalty",
        "1.2",
        "--max-tokens",
        "40",
        "--min-tokens",
        "4",
        "--stop",
        "e",
        "--json",
    )
    remote = llorch_here("generate", "--connect", tiny_worker.address, *flags).document()
    local = llorch_here("generate", tiny, *flags).document()
    for key in ("token_ids", "text", "logprobs"):
        assert remote[key] == local[key]


@pytest.mark.parametrize(
    "flag",
    [("DIR",), ("--model", "m"), ("--no-kv-cache",), ("--max-context", "64"), ("--threads", "1")],
    ids=lambda flag: flag[0],
)
def test_flags_that_a_worker_cannot_follow_are_refused(flag):
    outcome = llorch_here("generate", "--connect", "127.0.0.1:1", *PROMPT, *flag)
    assert outcome.code == 2
    assert flag[0] in outcome.error()


def test_no_worker_is_an_error_of_its_own():
    outcome = llorch_here("generate", "--connect", "127.0.0.1:1", *PROMPT)
    assert outcome.code == 7
    assert "127.0.0.1:1" in outcome.error()


def test_wait_gives_a_worker_its_time():
    outcome = llorch_here("generate", "--connect", "127.0.0.1:1", "--wait", "0.3", *PROMPT)
    assert outcome.code == 7
    assert "after 0.3 s" in outcome.error()


def test_ctrl_c_ends_a_remote_answer_and_frees_its_slot(long):
    with serving(long, "--slots", "1") as worker:
        flags = ("--connect", worker.address, *PROMPT)
        with running("generate", *flags, "--max-tokens", "150000", "--ignore-eos") as command:
            assert command.stdout.read(1)
            command.process.send_signal(signal.SIGINT)
            command.stdout.read()
            assert command.wait() == 130
        again = llorch_here("generate", *flags, "--max-tokens", "4", "--json").document()
        assert len(again["token_ids"]) == 4


def test_a_stdout_that_lacks_characters_gets_replacements(tiny):
    found = llorch("generate", tiny, *PROMPT, "--choice", "\U0001f642 ok", PYTHONIOENCODING="ascii")
    assert (found.code, found.stdout) == (0, "? ok\n")
