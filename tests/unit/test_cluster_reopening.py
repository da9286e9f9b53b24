"""A front whose model is deployed anew from another artifact goes on with that one, and refuses nothing."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from llorch_serve.calls.interfaces import spread_of
from llorch_serve.cluster.follow import ModelFollower
from llorch_serve.cluster.reopening import ReopenableGenerator
from llorch_serve.cluster.routed_generator import open_routed
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.cluster.totals import totals_of
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    ArtifactError,
    InvalidRequestError,
    ModelMismatchError,
    UnavailableError,
    WorkerError,
)
from llorch_serve.observe.meters import Meters
from llorch_serve.requests import (
    GenerationRequest,
    ScoreRequest,
    TextPrompt,
)
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import INFO, PATIENCE_S, FakeGenerator
from support.fakes.replicas import FakeReplicas, reader_of, replica_of
from support.harness.http import running_front
from support.harness.rpc import open_stub, running_server
from support.harness.worker import Sink

OLD, NEW = "a" * 64, "b" * 64


class Model(FakeGenerator):
    """A model of another fingerprint; ``mark`` follows each word that it says."""

    def __init__(self, fingerprint, mark=0, **how):
        self.info = replace(INFO, fingerprint=fingerprint, **how.pop("info", {}))
        super().__init__(padding=mark, **how)

    def model_info(self):
        return self.info


class Deployment:
    """What runs of a model, as one handle knows it: replicas of several fingerprints at times."""

    def __init__(self, *models):
        self.running = tuple(replica_of(each, f"r-{each.info.fingerprint[0]}") for each in models)

    def run(self, *models):
        self.running = Deployment(*models).running

    def of(self, fingerprint):
        return [each for each in self.running if each.description.info.fingerprint == fingerprint]


class Pinned(FakeReplicas):
    """The replicas of one fingerprint; requests wait while none is there."""

    def __init__(self, deployment, fingerprint):
        self.deployment, self.fingerprint, self.closed = deployment, fingerprint, threading.Event()
        self.waiting: set[str] = set()
        super().__init__()

    async def there(self):
        while not self.deployment.of(self.fingerprint):
            await asyncio.sleep(0.001)
        return tuple(self.deployment.of(self.fingerprint))

    async def call(self, kind, raw, *, hint):
        assert hint.fingerprint == self.fingerprint
        self.waiting.add(hint.request_id)
        self.replicas = await self.there()
        self.waiting.discard(hint.request_id)
        async for part in super().call(kind, raw, hint=hint):
            yield part

    async def describe(self):
        self.replicas = await self.there()
        return await super().describe()

    async def loads(self):
        self.replicas = self.deployment.running
        return await super().loads()

    async def close(self):
        self.closed.set()


class Front:
    """A front over a deployment that begins with one model."""

    def __init__(self, old, new):
        self.old, self.new, self.deployment = old, new, Deployment(old)
        self.before = Pinned(self.deployment, OLD)
        self.generator = ReopenableGenerator(self.routed(self.before, old))

    def routed(self, replicas, model, check=lambda: None):
        return open_routed(
            replicas, lambda told: reader_of(model, told), check=check, check_s=0.001, load_interval_s=0.001
        )

    def reopen(self):
        self.generator.replace(self.routed(Pinned(self.deployment, NEW), self.new))

    def wait_until_waits(self, request_id):
        until = threading.Event()
        for _ in range(int(PATIENCE_S * 1000)):
            if request_id in self.before.waiting:
                return
            until.wait(0.001)
        raise AssertionError("it did not come to wait")


@pytest.fixture
def front():
    old, new = Model(OLD, free_running=False), Model(NEW, mark=3)
    made = Front(old, new)
    yield made
    made.generator.close()
    old.close()
    new.close()


def asked(name, tokens=2, **more):
    return GenerationRequest(name, TextPrompt("a"), SamplingParams(max_tokens=tokens, seed=1), **more)


def submit(front, request):
    sink = Sink()
    return sink, front.generator.submit(request, sink)


def end_of(sink, name):
    return sink.answers(name)[name]


def test_what_runs_ends_where_it_began_and_what_is_new_goes_to_the_new_model(front):
    running, _ = submit(front, asked("running"))
    front.old.wait_for(lambda old: old.live_ids)
    front.deployment.run(front.old, front.new)
    front.reopen()
    sink, _ = submit(front, asked("new"))
    assert end_of(sink, "new").text == "w0 ...w1 ..."
    assert front.generator.model_info().fingerprint == NEW
    front.deployment.run(front.new)
    assert not front.before.closed.is_set()
    front.old.run_freely()
    assert end_of(running, "running").text == "w0 w1 "
    assert front.before.closed.wait(PATIENCE_S)


def test_a_request_that_waits_as_the_old_replicas_are_gone_is_answered_by_the_new_model(front):
    front.deployment.run(front.new)
    sink, _ = submit(front, asked("r"))
    scored = Sink()
    front.generator.submit_score(ScoreRequest("s", TextPrompt("a"), (TextPrompt("bc"),)), scored)
    front.wait_until_waits("r")
    front.reopen()
    assert end_of(sink, "r").text == "w0 ...w1 ..."
    assert end_of(scored, "s").updates[-1].score.token_count == 2


def test_what_is_pinned_to_the_old_model_is_refused_by_the_new(front):
    front.deployment.run(front.new)
    sink, _ = submit(front, asked("waits", fingerprint=OLD))
    front.wait_until_waits("waits")
    front.reopen()
    assert isinstance(end_of(sink, "waits").error, ModelMismatchError)
    with pytest.raises(ModelMismatchError, match=f"'{OLD}' was asked for, this worker serves '{NEW}'"):
        submit(front, asked("later", fingerprint=OLD))
    with pytest.raises(ModelMismatchError):
        front.generator.submit_score(
            ScoreRequest("s", TextPrompt("a"), (TextPrompt("b"),), fingerprint=OLD), Sink()
        )
    sink, _ = submit(front, asked("right", fingerprint=NEW))
    assert end_of(sink, "right").text == "w0 ...w1 ..."


def test_a_request_that_waits_is_not_answered_under_a_name_that_is_gone(front):
    front.new.info = replace(front.new.info, model_id="another")
    front.deployment.run(front.new)
    sink, _ = submit(front, asked("r"))
    front.wait_until_waits("r")
    front.reopen()
    error = end_of(sink, "r").error
    assert isinstance(error, ModelMismatchError)
    assert "not all of its names" in str(error)


def test_a_request_that_has_moved_is_aborted_where_it_is(front):
    still = Model(NEW, free_running=False)
    front.deployment.run(still)
    sink, abort = submit(front, asked("r"))
    front.wait_until_waits("r")
    front.reopen()
    still.wait_for(lambda new: new.live_ids)
    abort()
    assert end_of(sink, "r").completion.reason is FinishReason.CANCELLED
    still.wait_for(lambda new: not new.live_ids)
    still.close()


def test_an_id_stays_taken_while_the_old_model_answers_it(front):
    sink, _ = submit(front, asked("r"))
    front.old.wait_for(lambda old: old.live_ids)
    front.deployment.run(front.new)
    front.reopen()
    with pytest.raises(InvalidRequestError, match="belongs to a live request"):
        submit(front, asked("r"))
    front.old.run_freely()
    assert end_of(sink, "r").text == "w0 w1 "


def test_figures_are_of_both_models_and_what_was_counted_stays(front):
    counted = front.generator.load().generated_tokens
    meters = Meters()
    meters.watch(front.generator)
    submit(front, asked("r"))
    front.old.wait_for(lambda old: old.live_ids)
    front.deployment.run(front.old, front.new)
    front.reopen()
    assert spread_of(front.generator) is front.generator
    assert [each.replica for each in totals_of(front.generator).replicas] == ["r-a", "r-b"]
    assert front.generator.load().slots == 16
    assert f'fingerprint="{NEW}"' in meters.expose()[0].decode()
    front.deployment.run(front.new)
    front.old.run_freely()
    assert front.before.closed.wait(PATIENCE_S)
    for thread in front.generator._threads:
        thread.join(PATIENCE_S)
    assert front.generator.load().generated_tokens == 2 * counted
    assert front.generator.load().slots == 8
    assert [each.replica for each in totals_of(front.generator).replicas] == ["r-b"]


def test_a_model_that_is_deployed_again_is_not_counted_twice(front):
    front.deployment.run(front.old, front.new)
    counted = front.old.load().generated_tokens
    assert counted
    running, _ = submit(front, asked("running"))
    front.old.wait_for(lambda old: old.live_ids)
    front.reopen()
    front.generator.replace(front.routed(Pinned(front.deployment, OLD), front.old))
    both = front.generator.totals()
    names = [each.replica for each in both.replicas]
    assert names in (["r-a", "r-b"], ["r-a"])  # r-b until what answered by it, and has no answer, is closed
    assert (both.load.generated_tokens, both.load.slots) == (2 * counted, 8 * len(names))
    front.old.run_freely()
    assert end_of(running, "running").text == "w0 w1 "
    for thread in front.generator._threads:
        thread.join(PATIENCE_S)
    front.deployment.run(front.old)
    wait_until(lambda: front.generator.totals().load.slots == 8)
    assert front.generator.load().generated_tokens == 2 * counted
    assert [each.replica for each in front.generator.totals().replicas] == ["r-a"]


def test_no_request_fails_as_models_are_replaced_under_load():
    models = [Model(f"{place:064x}", mark=place) for place in range(4)]
    deployment = Deployment(models[0])

    def routed(model):
        return open_routed(
            Pinned(deployment, model.info.fingerprint),
            lambda told: reader_of(model, told),
            load_interval_s=0.001,
        )

    generator = ReopenableGenerator(routed(models[0]))
    ended, counts = threading.Event(), [0, 0, 0]
    with running_server() as running, open_stub(running.address) as stub, ThreadPoolExecutor(3) as pool:
        running.call(running.server.set_ready(generator))
        generator.when_answerable(
            lambda yes: running.loop.call_soon_threadsafe(running.server.set_answerable, yes)
        )

        def ask(number):
            while not ended.is_set():
                tokens = (1, 20, 200)[number]
                wanted = pb.GenerateRequest(input=pb.Input(text="a"), sampling=pb.Sampling(max_tokens=tokens))
                [choice] = stub.Generate(wanted, timeout=PATIENCE_S).choices
                assert len(choice.token_ids) == tokens
                # Of one model alone.
                assert len({len(word) for word in choice.text.split()[10:19]}) <= 2
                counts[number] += 1

        asking = [pool.submit(ask, number) for number in range(3)]
        try:
            for before, model in itertools.pairwise(models):
                deployment.run(before, model)
                seen = counts[0]
                while counts[0] == seen and not any(each.done() for each in asking):
                    ended.wait(0.001)
                deployment.run(model)  # what is submitted now waits
                generator.replace(routed(model))
                told = stub.GetModelInfo(pb.GetModelInfoRequest())
                assert told.fingerprint == model.info.fingerprint
        finally:
            ended.set()
        for each in asking:
            each.result()
        assert min(counts) > 0
        pinned = pb.GenerateRequest(input=pb.Input(text="a"), fingerprint=models[0].info.fingerprint)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(pinned)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    generator.close()
    for model in models:
        model.close()


def test_models_and_health_over_http_tell_of_the_new_model(front):
    def told(port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/v1/models")
        [model] = json.loads(connection.getresponse().read())["data"]
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
        return model["id"], model["llorch"]["fingerprint"], status

    front.new.info = replace(front.new.info, model_id="fake-2M")
    with running_front(front.generator) as running:
        assert told(running.port) == ("fake-1M", OLD, 200)
        front.deployment.run(front.old, front.new)
        front.reopen()
        assert told(running.port) == ("fake-2M", NEW, 200)


def test_a_closed_front_opens_nothing(front):
    opened = Pinned(front.deployment, NEW)
    front.deployment.run(front.old, front.new)
    routed = front.routed(opened, front.new)
    front.old.run_freely()
    front.generator.close()
    with pytest.raises(UnavailableError):
        front.generator.replace(routed)
    assert opened.closed.is_set()


def test_replicas_that_cannot_be_let_go_of_keep_neither_their_figures_nor_the_front(front, monkeypatch):
    async def broken():
        raise RuntimeError("the head is gone")

    monkeypatch.setattr(front.before, "close", broken)
    front.deployment.run(front.new)
    front.reopen()
    for thread in front.generator._threads:
        thread.join(PATIENCE_S)
    assert front.generator.load().slots == 8
    monkeypatch.setattr(front.generator.current._replicas, "close", broken)
    front.generator.close()

    def unreadable(_told):
        raise ArtifactError("the tokenizer is damaged")

    failing = Pinned(front.deployment, NEW)
    monkeypatch.setattr(failing, "close", broken)
    with pytest.raises(ArtifactError, match="is damaged"):
        open_routed(failing, unreadable)


def test_a_caller_who_can_be_told_nothing_does_not_keep_those_behind_from_being_answered(front):
    class Gone:
        def deliver(self, _updates):
            raise RuntimeError("the loop is closed")

    front.deployment.run(front.new)
    front.generator.submit(asked("gone", fingerprint=OLD), Gone())
    sink, _ = submit(front, asked("r"))
    front.wait_until_waits("gone")
    front.wait_until_waits("r")
    front.reopen()
    assert end_of(sink, "r").text == "w0 ...w1 ..."
    assert front.before.closed.wait(PATIENCE_S)


def test_what_is_told_last_is_whether_the_new_model_can_answer(front):
    told, began, opened = [], threading.Event(), threading.Event()

    def tell(answerable):
        if not answerable:
            began.set()
            opened.wait(0.3)
        told.append(answerable)
        if answerable:
            opened.set()

    front.generator.when_answerable(tell)
    front.deployment.run(front.old, front.new)
    absent = threading.Thread(target=front.generator._tell, args=(front.generator.current, False))
    absent.start()
    assert began.wait(PATIENCE_S)
    front.reopen()
    absent.join(PATIENCE_S)
    assert told == [False, True]


SETTINGS = ReplicaSettings(model="m", artifact="/models/m", fingerprint=OLD, version="1", cores=1)
ANEW = ReplicaSettings(model="m", artifact="/models/n", fingerprint=NEW, version="1", cores=1)


def follower(front, found, open_model=None, **how):
    """Return a follower of a deployment that is found so, one look after the other."""
    left = iter(found)

    def open_new(_settings, check):
        return front.routed(Pinned(front.deployment, NEW), front.new, check)

    said = []
    made = ModelFollower(front.generator, lambda: next(left), open_model or open_new, said.append, **how)
    return made, said


def test_a_model_that_is_the_same_is_left_alone(front):
    made, said = follower(front, [SETTINGS])
    before = front.generator.current
    made.look()
    assert front.generator.current is before
    assert said == []


def test_a_model_that_was_deployed_anew_is_opened_once_a_replica_of_it_runs(front):
    made, said = follower(front, [ANEW, ANEW, ANEW], look_s=3600)
    looking = threading.Thread(target=made.look)
    looking.start()
    sink, _ = submit(front, asked("r"))
    front.old.run_freely()
    assert end_of(sink, "r").text == "w0 w1 "  # while the other is waited for
    front.deployment.run(front.old, front.new)
    looking.join(PATIENCE_S)
    assert front.generator.model_info().fingerprint == NEW
    assert said == [
        "m was deployed anew from /models/n; waiting for a replica of it",
        f"serving fake-1M (int8) of fingerprint {NEW[:12]} now",
    ]


def test_a_model_that_was_deleted_ends_the_front(front):
    made, _ = follower(front, [None])
    with pytest.raises(WorkerError, match="was deleted"):
        made.look()


def test_a_model_that_cannot_be_opened_here_ends_the_front_with_the_reason(front):
    def missing(_settings, _check):
        raise ArtifactError("/models/n has no manifest.json")

    made, _ = follower(front, [ANEW], missing)
    with pytest.raises(WorkerError, match=r"this front cannot open: /models/n has no manifest\.json"):
        made.look()


@pytest.mark.parametrize("error", [ConnectionError("reset"), TimeoutError("no answer")])
def test_a_cluster_that_does_not_answer_does_not_end_the_front(front, error):
    def lost(_settings, _check):
        raise error

    made, _ = follower(front, [ANEW], lost)
    with pytest.raises(type(error)):
        made.look()


def test_a_model_of_another_kind_ends_the_front(front):
    front.new.info = replace(front.new.info, embedding_size=8)
    front.deployment.run(front.old, front.new)
    made, _ = follower(front, [ANEW], look_s=3600)
    with pytest.raises(WorkerError, match="which embeds texts, where this front's generates text"):
        made.look()
    assert front.generator.model_info().fingerprint == OLD


@pytest.mark.parametrize("then", [SETTINGS, RuntimeError("restarted")])
def test_a_wait_ends_where_the_old_model_is_deployed_again(front, then):
    looks = iter([ANEW, then, SETTINGS])

    def find():
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    made, _ = follower(front, [])
    made = ModelFollower(
        front.generator,
        find,
        lambda _, check: front.routed(Pinned(front.deployment, NEW), front.new, check),
        lambda _: None,
        look_s=0.0,
    )
    made.look()
    assert front.generator.model_info().fingerprint == OLD


def test_it_is_urgent_while_replicas_of_a_model_run_that_is_not_known(front):
    made, _ = follower(front, [SETTINGS] * 10)
    assert not made.is_urgent()
    front.deployment.run(front.old, front.new)
    wait_until(made.is_urgent)
    made.look()
    assert not made.is_urgent()  # it is of no use, as another is deployed
    front.deployment.run(front.new)
    wait_until(made.is_urgent)


def wait_until(true):
    pause = threading.Event()
    for _ in range(int(PATIENCE_S * 1000)):
        if true():
            return
        pause.wait(0.001)
    raise AssertionError("it never came")
