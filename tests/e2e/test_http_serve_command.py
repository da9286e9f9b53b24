"""``llorch serve --http`` as a process: curl, scrape, logs, spans, ports, signals, and the real model through
OpenAI's client.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.requests import GenerationRequest, TextPrompt
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import PATIENCE_S
from support.harness.collector import span_collector
from support.harness.http import send
from support.harness.processes import llorch_here, serving
from support.harness.terminal import CTRL_C, terminal

CANARY = "xylophone-canary"
STOPS = {"stop_token_ids": list(range(512))}
"""Whatever the tiny model says first ends its answer."""


def port_of(worker):
    """Return the port of its HTTP front."""
    return int(worker.command.wait_for_line(r"HTTP at http://\S+:(\d+)").group(1))


@pytest.fixture(scope="module")
def both(tiny):
    """A worker that serves the tiny model over gRPC and HTTP, and the port of the latter."""
    with serving(tiny, "--http", "0") as worker:
        yield worker, port_of(worker)


def test_both_ways_lead_to_the_same_engine(both):
    worker, port = both
    body = {"prompt": "Paris", "max_tokens": 8, "temperature": 0}
    over_http = send(port, "POST", "/v1/completions", body).document
    with WorkerClient(worker.address) as client:
        sampling = SamplingParams(max_tokens=8, temperature=0)
        updates = list(client.generate(GenerationRequest("a", TextPrompt("Paris"), sampling)))
        assert over_http["choices"][0]["text"] == "".join(u.text for u in updates)
        assert send(port, "GET", "/load").document["generated_tokens"] == client.load().generated_tokens
        assert send(port, "GET", "/v1/models").document["data"][0]["id"] == client.model_info().model_id


def test_a_person_at_a_terminal_is_told_what_to_do(tiny):
    flags = ("--served-model-name", "gpt-4o-mini", "--unknown-fields", "ignore", "--allowed-host", "gpu-box")
    with terminal("serve", tiny, "--port", "0", "--http", "0", *flags) as screen:
        url = screen.wait_for(r"  address  (http://127.0.0.1:\d+)/v1 \(OpenAI's API\), 127").group(1)
        screen.wait_for(rf"  try      curl {url}/v1/chat/completions")
        screen.wait_for(rf"  page     {url}/")
        port = int(url.rpartition(":")[2])
        body = {"model": "gpt-4o-mini", "prompt": "Paris", "max_tokens": 2, "num_ctx": 1}
        answer = send(port, "POST", "/v1/completions", body, {"Host": f"gpu-box:{port}"}).document
        assert answer["model"] == "gpt-4o-mini"
        assert answer["choices"][0]["llorch"]["ignored"] == ["num_ctx"]
        screen.wait_for("unknown fields of requests are ignored: num_ctx")
        screen.press(CTRL_C)
        assert screen.wait() == 0


def test_a_log_has_no_lines_for_people_at_terminals(both):
    assert not [line for line in both[0].command.log if line.startswith("  ")]


def test_curl_is_enough(both):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    url = f"http://127.0.0.1:{both[1]}/v1/completions"
    body = json.dumps({"prompt": "Paris", "max_tokens": 4, "stream": True})
    result = subprocess.run(
        [curl, "-sSN", "--fail", url, "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert result.stdout.startswith("data: {")
    assert result.stdout.endswith("data: [DONE]\n\n")


def test_a_scrape_counts_requests_of_both(both):
    worker, port = both

    def count():
        families = text_string_to_metric_families(send(port, "GET", "/metrics").body.decode())
        samples = {s.name: s.value for family in families for s in family.samples}
        return samples["llorch:e2e_request_latency_seconds_count"], samples["llorch:generation_tokens_total"]

    before = count()
    send(port, "POST", "/v1/completions", {"prompt": "Paris", "max_tokens": 3, "ignore_eos": True})
    with WorkerClient(worker.address) as client:
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        list(client.generate(GenerationRequest("b", TextPrompt("Paris"), sampling)))
    worker.command.wait_for_line(r"b: \d+ prompt tokens")
    after = count()
    assert (after[0] - before[0], after[1] - before[1]) == (2, 6)


def test_json_logs_are_json_alone_and_hold_no_prompt(tiny):
    with serving_json(tiny) as (command, port):
        send(
            port, "POST", "/v1/completions", {"prompt": CANARY, "max_tokens": 2}, {"X-Correlation-ID": "c-1"}
        )
        command.wait_for_line("inference.complete")
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.wait() == 0
        events = [json.loads(line) for line in command.log]
    assert CANARY not in json.dumps(events)
    actions = [event.get("action") for event in events]
    assert {"http.listen", "worker.listen", "worker.ready", "inference.complete"} <= set(actions)
    done = events[actions.index("inference.complete")]
    assert (done["correlation_id"], done["tokens_out"]) == ("c-1", 2)


@contextlib.contextmanager
def serving_json(folder):
    from support.harness.processes import running

    flags = ("--port", "0", "--http", "0", "--log-format", "json")
    with running("serve", folder, *flags) as command:
        listening = command.wait_for_line('"http.listen"').string
        command.wait_for_line('"worker.ready"')
        yield command, int(json.loads(listening)["target"].rpartition(":")[2])


def test_spans_arrive_at_a_collector(tiny):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with span_collector() as collector:
        with serving(tiny, "--http", "0", "--otlp-endpoint", collector.url) as worker:
            body = {"prompt": CANARY, "max_tokens": 2}
            send(port_of(worker), "POST", "/v1/completions", body, {"traceparent": trace})
            os.kill(worker.command.process.pid, signal.SIGTERM)
            assert worker.command.wait() == 0
        (span,) = collector.of_trace(trace.split("-")[1])
    assert span.name.startswith("text_completion ")
    assert CANARY not in str(span)


def test_a_taken_port_ends_the_command_before_the_model_loads(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = llorch_here("serve", tiny, "--port", "0", "--http", taken.getsockname()[1])
    assert outcome.code == 5
    assert "cannot listen on 127.0.0.1" in outcome.stderr
    assert "loading" not in outcome.stderr


def test_an_address_that_is_none_is_refused(tiny):
    outcome = llorch_here("serve", tiny, "--http", "nowhere:http")
    assert (outcome.code, "--http is 'nowhere:http'" in outcome.error()) == (5, True)


def test_the_address_comes_from_the_environment_too(tiny):
    with serving(tiny, LLORCH_HTTP="127.0.0.1:0") as worker:
        assert send(port_of(worker), "GET", "/health").status == 200


def test_sigterm_lets_streams_finish(long):
    with serving(long, "--http", "0") as worker:
        port = port_of(worker)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", timeout=PATIENCE_S)
        with client:
            extra = {"ignore_eos": True}
            stream = client.completions.create(
                model=client.models.list().data[0].id,
                prompt="Once",
                max_tokens=2000,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
            )
            next(stream)
            os.kill(worker.command.process.pid, signal.SIGTERM)
            *_, last = stream
            assert last.usage.completion_tokens == 2000
        assert worker.command.wait() == 0


def test_a_client_that_leaves_frees_its_slot(long):
    with serving(long, "--http", "0", "--slots", "1") as worker:
        port = port_of(worker)
        endless = {"prompt": "Once", "ignore_eos": True, "max_tokens": 150_000, "stream": True}
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
                raw = json.dumps(endless).encode()
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                    f"application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
                )
                client.sendall(head.encode() + raw)
                assert client.recv(100).startswith(b"HTTP/1.1 200")
        answer = send(
            port, "POST", "/v1/completions", {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
        )
        assert answer.document["usage"]["completion_tokens"] == 3


@pytest.fixture
def client(both):
    """OpenAI's client of the tiny model."""
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{both[1]}/v1", api_key="-", timeout=PATIENCE_S, max_retries=0
    ) as made:
        yield made


def asked(client, **more):
    return {"model": client.models.list().data[0].id, "prompt": "Paris", "max_tokens": 4} | more


def test_several_answers_have_their_own_seeds_and_texts(client):
    body = asked(client, n=3, seed=7, temperature=2)
    whole = client.completions.create(**body)
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert len({c.llorch["seed"] for c in whole.choices}) == 3
    assert len({c.text for c in whole.choices}) > 1
    texts = ["", "", ""]
    for chunk in client.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in whole.choices]
    alone = client.completions.create(**asked(client, seed=whole.choices[1].llorch["seed"], temperature=2))
    assert alone.choices[0].text == texts[1]
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens


def test_the_best_of_several_is_the_likeliest(client):
    body = asked(client, seed=7, temperature=2, logprobs=0, extra_body={"ignore_eos": True})
    best = client.completions.create(**body, best_of=4)
    every = client.completions.create(**body, n=4)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    (chosen,) = best.choices
    assert mean(chosen) == pytest.approx(max(map(mean, every.choices)))
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(**body, best_of=4, stream=True)


def test_completions_tell_log_probabilities_in_columns(client):
    answer = client.completions.create(**asked(client, logprobs=3, temperature=0, echo=True))
    (choice,) = answer.choices
    columns = choice.logprobs
    assert choice.text.startswith("Paris")
    assert len(columns.tokens) == answer.usage.total_tokens
    assert "".join(columns.tokens) == choice.text
    assert columns.text_offset == [len("".join(columns.tokens[:i])) for i in range(len(columns.tokens))]
    assert (columns.token_logprobs[0], columns.top_logprobs[0]) == (None, None)
    generated = answer.usage.completion_tokens
    for token, logprob, top in list(
        zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True)
    )[-generated:]:
        assert top[token] == logprob == max(top.values())  # greedy
    streamed = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(
            **asked(client, logprobs=3, temperature=0, echo=True), stream=True
        )
    ]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in streamed for value in getattr(part, name)] == getattr(columns, name)


def columns_of(client, *, streamed, **body):
    """Return what is told of a completion's log-probabilities, whole or put together from its chunks."""
    if not streamed:
        return client.completions.create(**body).choices[0].logprobs.model_dump()
    parts = [
        chunk.choices[0].logprobs.model_dump() for chunk in client.completions.create(**body, stream=True)
    ]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def likelihood(columns, context):
    """Return what lm-eval makes of an echo: all behind the context but the last place, which is generated."""
    of, tops = columns["token_logprobs"][context:-1], columns["top_logprobs"][context:-1]
    return sum(of), all(one == max(top.values()) for one, top in zip(of, tops, strict=True))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ending", [{"ignore_eos": True}, STOPS], ids=["on", "stop"])
def test_an_echo_tells_lm_eval_a_continuations_likelihood(both, client, streamed, ending):
    context, rest = [40, 41, 42, 43, 44], [45, 300, 46]
    scored = send(
        both[1],
        "POST",
        "/v1/score",
        {"context": context, "continuations": [rest, rest[:1]]},
    ).document["data"]
    for score, length in zip(scored, (3, 1), strict=True):
        body = asked(
            client, prompt=context + rest[:length], max_tokens=1, logprobs=1, echo=True, temperature=0
        )
        columns = columns_of(client, streamed=streamed, **body, extra_body=ending)
        assert {len(column) for column in columns.values()} == {len(context) + length + 1}
        total, is_greedy = likelihood(columns, len(context))
        assert total == pytest.approx(score["logprob"], abs=1e-5)
        assert is_greedy is score["is_greedy"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_completions_stop_token_has_the_last_place_in_the_columns(client, streamed):
    body = asked(client, logprobs=3, temperature=0)
    plain = client.completions.create(**body, extra_body={"ignore_eos": True}).choices[0]
    # <|eos|>, which the bias brings about; its log-probability is the model's own.
    body |= {"logit_bias": {"1": 100}}
    columns = columns_of(client, streamed=streamed, **body)
    assert columns["tokens"] == ["<|eos|>"]
    assert columns["text_offset"] == [0]
    assert columns["token_logprobs"][0] < max(columns["top_logprobs"][0].values())
    values = [sorted(top.values()) for top in (columns["top_logprobs"][0], plain.logprobs.top_logprobs[0])]
    assert values[0] == values[1]
    assert client.completions.create(**body).choices[0].text == ""
    echoed = columns_of(client, streamed=streamed, **body, echo=True)
    assert echoed["tokens"][-1] == "<|eos|>"
    assert echoed["text_offset"][-1] == len("Paris")
    nothing = columns_of(client, streamed=streamed, **body | {"echo": True, "max_tokens": 0})
    assert nothing["tokens"] == echoed["tokens"][:-1]


def test_a_chats_stop_token_has_no_place(client):
    body = asked(client, messages=[{"role": "user", "content": "Hi"}], logprobs=True, logit_bias={"1": 100})
    del body["prompt"]
    answer = client.chat.completions.create(**body)
    assert answer.choices[0].llorch["stop_matched"] == "<|eos|>"
    assert answer.choices[0].logprobs.content == []


def test_chats_tell_log_probabilities_in_places(client):
    body = asked(client, messages=[{"role": "user", "content": "Hi"}], temperature=0)
    del body["prompt"]
    answer = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    raw = b"".join(bytes(place.bytes) for place in choice.logprobs.content)
    # The tiny model's answers are no words, and may hold parts of characters.
    assert raw.decode(errors="ignore") == choice.message.content.replace("\ufffd", "")
    for place in choice.logprobs.content:
        assert place.top_logprobs[0].logprob == place.logprob
        assert len(place.top_logprobs) == 2
    with pytest.raises(openai.BadRequestError, match="set without logprobs"):
        client.chat.completions.create(**body, top_logprobs=2)


def test_biases_and_penalties_have_an_effect(client):
    plain = client.completions.create(**asked(client, temperature=0, extra_body={"ignore_eos": True}))
    forced = client.completions.create(**asked(client, temperature=0, logit_bias={"400": 100}))
    assert len(set(forced.choices[0].text.split("\x00"))) == 1
    assert forced.choices[0].text != plain.choices[0].text
    for name in ("presence_penalty", "frequency_penalty"):
        with pytest.raises(openai.BadRequestError, match=f"{name}: found 3.0"):
            client.completions.create(**asked(client, **{name: 3}))
    with pytest.raises(openai.BadRequestError, match="expected token ids"):
        client.completions.create(**asked(client, logit_bias={"a": 1}))
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**asked(client, logit_bias={"99999": 1}, n=17))
    assert [item["field"] for item in caught.value.body["errors"]] == ["logit_bias[99999]", "n"]


def test_answers_keep_the_form_that_is_asked_for(both):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{both[1]}/v1", api_key="-", timeout=PATIENCE_S, max_retries=0
    ) as client:
        asked = {
            "model": client.models.list().data[0].id,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 60,
            "temperature": 0,
        }

        def form(schema):
            return {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}

        answer = client.chat.completions.create(**asked, response_format=form(schema))
        assert json.loads(answer.choices[0].message.content)["ok"] in (True, False)
        pieces = client.chat.completions.create(**asked, response_format=form(schema), stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        assert set(json.loads(streamed)) == {"ok"}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked, response_format=form({"type": "nonsense"}))
        assert caught.value.param == "response_format.json_schema.schema"
        with pytest.raises(openai.BadRequestError, match="needs one"):
            client.chat.completions.create(**asked, response_format={"type": "json_schema"})
        with pytest.raises(openai.BadRequestError, match="response_format"):
            client.chat.completions.create(**asked, response_format={"type": "xml"})


@pytest.mark.real_model
def test_the_real_model_chats(smollm2):
    with (
        serving(smollm2("int8"), "--http", "0", "--max-context", "1024") as worker,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port_of(worker)}/v1", api_key="-", timeout=PATIENCE_S
        ) as client,
    ):
        asked = {
            "model": client.models.list().data[0].id,
            "messages": [
                {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
            ],
            "temperature": 0,
            "max_tokens": 24,
        }
        whole = client.chat.completions.create(**asked).choices[0]
        assert "Paris" in whole.message.content
        pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
        assert len(pieces) > 3
        assert pieces[-1].finish_reason == whole.finish_reason
