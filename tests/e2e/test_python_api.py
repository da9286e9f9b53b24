"""``import llorch``: a model in this process and one behind a worker are the same to their callers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import llorch
from support.harness.documents import ROOT, blocks
from support.harness.processes import PATIENCE_S, WorkerProcess, environment

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module", params=["in this process", "behind a worker"])
def model(request: pytest.FixtureRequest, tiny: Path, tiny_worker: WorkerProcess) -> Iterator[llorch.Model]:
    if request.param == "in this process":
        with llorch.load(tiny, threads=1) as model:
            yield model
    else:
        with llorch.connect(tiny_worker.address, wait_s=PATIENCE_S) as model:
            yield model


@pytest.fixture(params=["in this process", "behind a worker"])
def opened(request: pytest.FixtureRequest, tiny: Path, tiny_worker: WorkerProcess) -> Callable[[], object]:
    """Return what opens a model for an event loop."""

    @asynccontextmanager
    async def opening() -> AsyncIterator[llorch.AsyncModel]:
        if request.param == "in this process":
            found = await llorch.load_async(tiny, threads=1)
        else:
            found = await llorch.connect_async(tiny_worker.address, wait_s=PATIENCE_S)
        async with found as model:
            yield model

    return opening


@contextmanager
def local(tiny: Path, **settings) -> Iterator[llorch.Model]:
    with llorch.load(tiny, **settings) as model:
        yield model


def timeless(answer: llorch.Answer) -> llorch.Answer:
    """Return an answer without what differs from run to run."""
    return replace(answer, timings=None, cached_tokens=0, seed=0)


def test_importing_it_imports_nothing_else():
    code = "import sys, llorch; print([name for name in sys.modules if name.split('.')[0] in "
    code += "('llorch_serve', 'llorch_export', 'grpc', 'onnxruntime', 'numpy', 'msgspec', 'onnx', 'typer')])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stdout.strip() == "[]"


def test_every_name_is_there():
    assert [name for name in llorch.__all__ if getattr(llorch, name, None) is None] == []
    assert set(llorch.__all__) <= set(dir(llorch))
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = llorch.lod


def test_the_same_answers_from_either(tiny: Path, tiny_worker: WorkerProcess):
    found = []
    with llorch.load(tiny) as here, llorch.connect(tiny_worker.address) as there:
        for model in (here, there):
            chat = model.chat("Hello", **GREEDY)
            found.append(
                (
                    timeless(model.generate("Once", **GREEDY)),
                    timeless(chat),
                    model.tokenize("Once upon"),
                    model.tokenize([{"role": "user", "content": "Hello"}]),
                    [score.token_count for score in model.score("Once", [" upon", " more"])],
                )
            )
    assert found[0] == found[1]
    assert len(found[0][0].token_ids) == 6


def test_a_stream_is_the_whole_answer_in_parts(model: llorch.Model):
    whole = model.generate("Once", **GREEDY)
    chunks = list(model.stream("Once", **GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [id_ for chunk in chunks for id_ in chunk.token_ids] == list(whole.token_ids)
    assert [chunk.answer is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert timeless(chunks[-1].answer) == timeless(whole)
    chunks = list(model.stream_chat([{"role": "user", "content": "Hello"}], **GREEDY))
    assert timeless(chunks[-1].answer) == timeless(model.chat("Hello", **GREEDY))


def test_many_prompts_are_answered_in_their_order(model: llorch.Model):
    prompts = ["One", "Two", [5, 6, 7]]
    answers = model.generate_all(prompts, **GREEDY)
    assert list(map(timeless, answers)) == [timeless(model.generate(prompt, **GREEDY)) for prompt in prompts]
    assert model.generate_all([]) == []


def test_every_setting_reaches_the_model(model: llorch.Model):
    plain = model.generate("Once", **GREEDY)
    assert model.generate("Once", **GREEDY | {"max_tokens": 2}).token_ids == plain.token_ids[:2]
    assert len(model.generate("Once", **GREEDY, logprobs=2).logprobs) == 6
    stopped = model.generate("Once", **GREEDY, stop_token_ids=[plain.token_ids[1]])
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", plain.token_ids[:1])
    first = plain.token_ids[0]
    assert model.generate("Once", **GREEDY, logit_bias={first: -100}).token_ids[0] != first
    seeded = {"temperature": 1.0, "seed": 11, "max_tokens": 8, "ignore_eos": True}
    assert model.generate("Once", **seeded).token_ids == model.generate("Once", **seeded).token_ids
    answers = model.sample("Once", 2, best_of=3, temperature=1, max_tokens=4)
    assert len({answer.seed for answer in answers}) == 2


@pytest.mark.parametrize(
    ("form", "matches"),
    [
        ({"choices": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}"}, str.isdigit),
        ({"json_schema": {"enum": [7]}}, "7".__eq__),
        ({"json_schema": '{"enum": [8]}'}, "8".__eq__),
        ({"grammar": 'start: "left"'}, "left".__eq__),
    ],
)
def test_forms_hold_the_answer(model: llorch.Model, form, matches):
    assert matches(model.generate("Once", max_tokens=32, **form).text)


def test_two_forms_are_refused_and_so_are_unknown_names(model: llorch.Model):
    with pytest.raises(ValueError, match="regex and choices"):
        model.generate("Once", regex="a", choices=["a"])
    with pytest.raises(TypeError, match=r"'max_token' is no setting; expected one of .*max_tokens"):
        model.generate("Once", max_token=3)
    with pytest.raises(TypeError, match="a conversation goes to chat"):
        model.generate([{"role": "user", "content": "Hello"}])
    with pytest.raises(TypeError, match="expected a list of texts"):
        model.score("Once", "upon")


def test_what_a_worker_would_refuse_is_refused_by_field(model: llorch.Model):
    with pytest.raises(llorch.InvalidRequestError) as caught:
        model.generate("Once", temperature=9, top_p=0)
    assert [bad.field for bad in caught.value.violations] == ["sampling.temperature", "sampling.top_p"]
    with pytest.raises(llorch.InvalidRequestError, match="content"):
        model.chat([{"role": "user", "content": 7}])
    with pytest.raises(llorch.InvalidRequestError, match="messages: found 0"):
        model.chat([])


def test_tools_and_template_arguments_reach_the_template(model: llorch.Model):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    alone = model.chat("Hello", **GREEDY).prompt_tokens
    assert model.chat("Hello", tools=[tool], **GREEDY).prompt_tokens >= alone
    none = model.chat("Hello", tools=[tool], tool_choice="none", parallel_tool_calls=False, **GREEDY)
    assert none.prompt_tokens == alone
    with pytest.raises(llorch.InvalidRequestError, match="tool_choice: found 'any', expected"):
        model.chat("Hello", tools=[tool], tool_choice="any")
    with pytest.raises(llorch.InvalidRequestError, match="--tool-format"):
        model.chat("Hello", tools=[tool], tool_choice={"type": "function", "function": {"name": "look"}})
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}]
    more = model.chat(asked, continue_final_message=True, **GREEDY)
    assert more.prompt_tokens < model.chat(asked, **GREEDY).prompt_tokens


def test_leaving_a_stream_ends_its_request(long: Path):
    with llorch.load(long, slots=1, max_context=4096) as model:
        for _ in model.stream("Once", ignore_eos=True):
            break
        assert model.generate("Once", **GREEDY).generated_tokens == 6  # in the one slot


def test_the_settings_of_loading_have_their_effect(tiny: Path):
    with local(tiny, slots=3, max_context=64, provider="cpu", prefix_cache=False) as model:
        assert (model.info().slots, model.info().context_length) == (3, 64)
        model.generate("Once upon a time", **GREEDY)
        assert model.generate("Once upon a time", **GREEDY).cached_tokens == 0
    for setting, error, words in (
        ({"slots": 0}, ValueError, "slots is 0, expected at least 1"),
        ({"slot": 2}, TypeError, "'slot' is no setting"),
        ({"provider": "nonesuch"}, llorch.ProviderError, "nonesuch"),
        ({"provider_options": {"nonesuch": "1"}}, llorch.LlorchError, "nonesuch"),
        ({"tool_format": "nonesuch"}, llorch.UsageError, "nonesuch"),
    ):
        with pytest.raises(error, match=words), local(tiny, **setting):
            pass
    with pytest.raises(llorch.ArtifactError, match="nowhere"):
        llorch.load("nowhere")


def test_a_worker_that_is_not_there_is_told(tmp_path: Path):
    with llorch.connect("127.0.0.1:1") as model, pytest.raises(llorch.WorkerError, match="no worker answers"):
        model.generate("Once")
    with pytest.raises(llorch.WorkerError, match="after 0 s"):
        llorch.connect("127.0.0.1:1", wait_s=0)
    with pytest.raises(llorch.UsageError, match="expected printable ASCII"):
        llorch.connect("127.0.0.1:1", token="\n")
    with pytest.raises(llorch.UsageError, match=r"tls_ca .* cannot be read"):
        llorch.connect("127.0.0.1:1", tls_ca=tmp_path / "none.pem")


def test_a_loop_is_answered_as_a_thread_is(opened, tiny: Path):
    async def ask() -> list[object]:
        async with opened() as model:
            stream = [chunk async for chunk in model.stream("Once", **GREEDY)]
            chat = [chunk async for chunk in model.stream_chat("Hello", **GREEDY)]
            return [
                timeless(await model.generate("Once", **GREEDY)),
                [timeless(answer) for answer in await model.generate_all(["One", "Two"], **GREEDY)],
                timeless(stream[-1].answer),
                timeless(chat[-1].answer),
                timeless(await model.chat("Hello", **GREEDY)),
                await model.tokenize("Once upon"),
                await model.detokenize([5, 6]),
                [score.token_count for score in await model.score("Once", [" upon"])],
                len(await model.sample("Once", 2, temperature=1, max_tokens=2)),
                (await model.info()).model_id,
            ]

    with llorch.load(tiny, threads=1) as model:
        once, chat = timeless(model.generate("Once", **GREEDY)), timeless(model.chat("Hello", **GREEDY))
        assert asyncio.run(ask()) == [
            once,
            [timeless(answer) for answer in model.generate_all(["One", "Two"], **GREEDY)],
            once,
            chat,
            chat,
            model.tokenize("Once upon"),
            model.detokenize([5, 6]),
            [score.token_count for score in model.score("Once", [" upon"])],
            2,
            model.info().model_id,
        ]


def test_a_cancelled_task_ends_its_request(long: Path):
    async def ask() -> int:
        async with await llorch.load_async(long, slots=1, max_context=4096) as model:
            begun = asyncio.Event()

            async def listen() -> None:
                async for _ in model.stream("Once", ignore_eos=True):
                    begun.set()

            endless = asyncio.create_task(listen())
            await begun.wait()
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            with pytest.raises(llorch.InvalidRequestError):
                await model.generate("Once", temperature=9)
            return (await model.generate("Once", **GREEDY)).generated_tokens  # in the one slot

    assert asyncio.run(ask()) == 6


def test_a_load_whose_task_is_cancelled_leaves_no_model_behind(tiny: Path):
    async def leave() -> None:
        loading = asyncio.create_task(llorch.load_async(tiny))
        await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

    asyncio.run(leave())


def test_an_export_is_that_of_the_command(tiny_source: Path, tiny: Path, tmp_path: Path):
    told = []
    result = llorch.export(tiny_source, tmp_path / "out", progress=lambda *so_far: told.append(so_far))
    assert result.changed
    assert result.artifact.manifest.fingerprint == fingerprint(tiny)
    assert told
    assert not llorch.export(tiny_source, tmp_path / "out", if_changed=True).changed
    plain = llorch.export(tiny_source, tmp_path / "fp32", precision="fp32", max_context=64)
    assert plain.artifact.manifest.recipe.precision == "fp32"
    by_recipe = llorch.export(tiny_source, tmp_path / "int4", recipe="int4", prefill_recipe="none")
    assert by_recipe.artifact.manifest.recipe.precision == "int4"
    with pytest.raises(TypeError, match="'precisoin' is no setting"):
        llorch.export(tiny_source, tmp_path / "no", precisoin="fp32")
    with pytest.raises(llorch.ArtifactError):
        llorch.export(tmp_path / "nothing", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def fingerprint(folder: Path) -> str:
    with llorch.load(folder, threads=1) as model:
        return model.info().fingerprint


def test_the_pages_examples_run(tiny: Path, tiny_gguf: Path, tiny_worker: WorkerProcess, tmp_path: Path):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(tiny_gguf)
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "smollm2").symlink_to(tiny)
    page = blocks(ROOT / "docs" / "python.md")
    text = "\n".join(line for block in page if block.language == "python" for line in block.lines)
    done = subprocess.run(
        [sys.executable, "-c", text.replace("50051", tiny_worker.port)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
