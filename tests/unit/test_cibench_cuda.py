"""``ci/bench-cuda`` without a GPU: it says so; what it asks of engines, and makes of those that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench_peers import cuda, cuda_models, models, ours
from bench_peers.card import require_card
from bench_peers.contestant import Closeness, Work
from bench_peers.cuda_models import Entrant, Forms, forms
from bench_peers.cuda_page import ModelResults, Result, page
from bench_peers.ours import Recipe
from bench_peers.protocol import Measurement
from bench_peers.results import Machine
from llorch_serve.errors import ProviderError, ResourceError, UsageError
from llorch_serve.providers.nvidia import Gpu, list_gpus, load_nvml
from support.harness.processes import with_scripts

CARD = Gpu(0, "NVIDIA H200", "580.159", 2**37, 2**37)
MACHINE = Machine("A CPU", 16, [], 128, "Linux", 0.1)


def test_a_machine_without_a_card_is_told_so_in_one_line() -> None:
    with pytest.raises(ProviderError, match=r"ci/bench-cuda needs an NVIDIA GPU, and .* lists none here"):
        require_card("ci/bench-cuda", ())
    assert require_card("ci/bench-cuda", (CARD,)) is CARD


def test_the_script_asks_before_it_fetches_anything() -> None:
    command = [sys.executable, "-m", "bench_peers.card", "ci/bench-cuda"]
    done = subprocess.run(command, capture_output=True, text=True, env=with_scripts(), check=False)
    assert done.stdout == ""
    if list_gpus(load_nvml()):
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 4
        assert done.stderr.count("\n") == 1
        assert "needs an NVIDIA GPU" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"peer": ["vllm"]}, "--peer is 'vllm'; expected NAME=PYTHON with a NAME of genai, vllm, llama.cpp"),
        ({"peer": ["tgi=python"]}, "--peer is 'tgi=python'"),
        ({"model": ["70b"]}, "--model is 70b; expected smollm2, 1b, 8b"),
        ({"streams": "1,0"}, "--streams is '1,0'; every number must be at least 1"),
        ({"streams": "8,8"}, "--streams is '8,8'; every number once is enough"),
        ({"streams": "1,²"}, "--streams is"),
    ],
)
def test_slips_are_named(arguments: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "require_card", lambda _script: CARD)
    with pytest.raises(UsageError, match=fault):
        cuda.command(Path("gguf"), Path("python"), **arguments)


def test_everyone_who_is_there_takes_part(tmp_path: Path) -> None:
    pythons = {"llorch": Path("p"), "genai": Path("g"), "vllm": Path("v"), "llama.cpp": Path("l")}
    labels = [entrant.label for entrant in Forms(Path("gguf"), tmp_path, pythons).entrants()]
    assert labels == [
        "llorch, fp16",
        "llorch, int4",
        "onnxruntime-genai, fp16",
        "onnxruntime-genai, int4",
        "vLLM, fp16",
        "llama.cpp, F16",
        "llama.cpp, Q4_0",
    ]
    alone = Forms(Path("gguf"), tmp_path, {"llorch": Path("p")}).entrants()
    assert [entrant.label for entrant in alone] == labels[:2]


def test_each_form_is_made_once_by_its_own_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def process(*arguments: Path | str, **_named: Any) -> str:
        line = tuple(map(str, arguments))
        ran.append(line)
        for place in line:
            if place.startswith(str(tmp_path)) and "/." in place:  # a form in the making
                Path(place).write_bytes(b"made")
        return ""

    monkeypatch.setattr(models, "run_process", process)
    monkeypatch.setattr(ours, "run_process", process)
    monkeypatch.setattr(cuda_models, "widen", lambda _gguf, target: target.write_bytes(b"hf"))
    pythons = {"llorch": Path("p"), "genai": Path("g"), "vllm": Path("v"), "llama.cpp": Path("l")}
    these = forms("smollm2", tmp_path / "smollm2.gguf", tmp_path, pythons)
    made = [entrant.make() for entrant in these.entrants()]
    assert [one.label for one in made] == [entrant.label for entrant in these.entrants()]
    assert {path.name for path in (tmp_path / "smollm2").iterdir()} == {
        "hf", "genai-fp16", "genai-int4", "llama.cpp-F16.gguf", "llama.cpp-Q4_0.gguf",
    }  # fmt: skip
    builders = [line for line in ran if "onnxruntime_genai.models.builder" in " ".join(line)]
    assert [line[line.index("-p") + 1] for line in builders] == ["fp16", "int4"]
    assert all(line[line.index("-e") + 1] == "cuda" for line in builders)
    exports = [line for line in ran if "export" in line]
    assert [line[-4:] for line in exports] == [
        ("--target", "cuda", "--precision", "fp16"),
        ("--target", "cuda", "--precision", "int4"),
    ]
    before = len(ran)
    for entrant in these.entrants():
        entrant.make()
    assert len(ran) - before == len(exports), "an export sees for itself whether it is there"


REPORT = {
    "schema_version": 2, "version": "1", "created": "2026-01-01T00:00:00Z", "repeat": 1,
    "host": {"system": "s", "cpu": "c", "cpu_features": [], "cpus": 1, "cpus_allowed": 1, "memory_bytes": 1},
}  # fmt: skip


def figure(value: float) -> dict[str, Any]:
    return {"unit": "u", "median": value, "low": value, "high": value, "values": [value]}


def entry(**changes: Any) -> str:
    rows = [
        {
            "test": {
                "kind": "offline", "work": "mixed", "prompt_tokens": 3, "generated_tokens": 4, "streams": n,
            },
            "figures": {"prefill_tokens_per_s": figure(10), "decode_tokens_per_s": figure(5)},
        }
        for n in (1, 8)
    ]  # fmt: skip
    values = {"label": "cuda", "provider": "CUDAExecutionProvider", "rows": rows, "peak_rss_mib": 7.0}
    values["software"] = ["llorch 0.1", "onnxruntime-gpu 1.31.1"]
    return json.dumps(REPORT | {"entries": [values | changes]})


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[Recipe, list[tuple[str, ...]], list[str]]:
    """A recipe on CUDA, what ``llorch`` was asked, and what it answers."""
    asked: list[tuple[str, ...]] = []
    answers: list[str] = []

    def process(*arguments: Path | str, **_named: Any) -> str:
        asked.append(tuple(map(str, arguments)))
        return answers.pop(0)

    monkeypatch.setattr(ours, "run_process", process)
    return Recipe("llorch, fp16", (), Path("folder"), "cuda@python"), asked, answers


def test_ours_is_measured_on_the_provider_with_room_for_the_work_alone(on_cuda: Any) -> None:
    recipe, asked, answers = on_cuda
    answers.append(entry())
    found = recipe.measure(Work((1, 2, 3), Path("ids"), 4, (1, 8), 1, 2))
    assert [(one.streams, one.version, one.peak_mib) for one in found] == [
        (1, "0.1, onnxruntime-gpu 1.31.1", 7.0),
        (8, "0.1, onnxruntime-gpu 1.31.1", 7.0),
    ]
    (line,) = asked
    assert line[line.index("--provider") + 1] == "cuda@python=folder"
    assert line[line.index("--max-context") + 1] == "7"


def test_divergence_is_that_on_the_provider(on_cuda: Any) -> None:
    recipe, asked, answers = on_cuda
    fidelity = {
        "kl": 0.25, "top1": 0.75, "max_abs": 1.0, "tokens": 4, "text": "t", "oracle": "o", "limit": 1.0,
        "passed": True, "same_source": True,
    }  # fmt: skip
    answers += [entry(fidelity=fidelity), entry()]

    class Kept:
        path = Path("reference")

    assert recipe.closeness(Kept(), Path(), 2) == Closeness(0.25, 0.75)
    assert asked[0][asked[0].index("--reference") + 1] == "reference"
    with pytest.raises(Exception, match="printed no fidelity"):
        recipe.closeness(Kept(), Path(), 2)


def test_an_entry_that_was_not_measured_is_an_error_with_its_reason(on_cuda: Any) -> None:
    recipe, _, answers = on_cuda
    answers.append(entry(problem={"exit_code": 6, "message": "no memory for a KV cache"}, rows=[]))
    with pytest.raises(ResourceError, match="did not measure: no memory for a KV cache"):
        recipe.measure(Work((1, 2, 3), Path("ids"), 4, (1, 8), 1, 2))


@dataclass
class Engine:
    """A contestant. fails: in which round it does."""

    label: str
    fails: int = 99
    ours: bool = False
    made: str = "by hand"
    turns: int = 0

    def measure(self, work: Work) -> list[Measurement]:
        self.turns += 1
        if self.turns == self.fails:
            raise ResourceError("out of memory")
        return measured(work.streams, 10.0 * self.turns)

    def closeness(self, _reference: Any, _scratch: Path, _threads: int) -> Closeness:
        return Closeness(0.5, 0.9)


class OurEngine(Recipe):
    """One of ours."""

    def measure(self, work: Work) -> list[Measurement]:
        return measured(work.streams, 10.0)

    def closeness(self, _reference: Any, _scratch: Path, _threads: int) -> Closeness:
        return Closeness(0.5, 0.9)


def measured(streams: Sequence[int], decode: float) -> list[Measurement]:
    return [
        Measurement("engine", "1", "w", count, 512, 128, 1000.0 * count, decode * count, None)
        for count in streams
    ]


def failing() -> Engine:
    raise ResourceError("the converter ended with 1: no such option")


def test_one_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "reference", lambda *_: None)
    work = Work(tuple(range(512)), Path("x"), 128, (1, 8), 1, 2)
    monkeypatch.setattr(cuda, "work_of", lambda *_: work)
    entrants = [
        Entrant("ours", lambda: OurEngine("ours", (), Path("ours"))),
        Entrant("late", lambda: Engine("late", fails=2)),
        Entrant("blind", lambda: Engine("blind"), gives_logits=False),
        Entrant("unmade", failing),
    ]
    found = cuda.run("smollm2", entrants, Path("gguf"), (1, 8), 3)
    problems = {result.label: result.problem for result in found.results}
    assert problems == {
        "ours": None,
        "late": "out of memory",
        "blind": None,
        "unmade": "the converter ended with 1: no such option",
    }
    counts = {result.label: len(result.measured) for result in found.results}
    assert counts == {"ours": 6, "late": 2, "blind": 6, "unmade": 0}
    close = {result.label: result.closeness for result in found.results}
    assert close == dict.fromkeys(("ours", "late"), Closeness(0.5, 0.9)) | {"blind": None, "unmade": None}


def test_what_is_known_is_written_after_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_one(name: str, *_asked: Any) -> ModelResults:
        if name == "8b":
            raise ResourceError("no memory for the reference")
        return ModelResults(name, [1], 3, [Result(name, measured=measured((1,), 10.0))])

    monkeypatch.setattr(cuda, "require_card", lambda _script: CARD)
    monkeypatch.setattr(cuda, "forms", lambda *_: Forms(Path("gguf"), tmp_path, {"llorch": Path("p")}))
    monkeypatch.setattr(cuda, "run", run_one)
    with pytest.raises(ResourceError, match="no memory"):
        cuda.command(Path("gguf"), Path("python"), model=["1b", "8b"], streams="1", output=tmp_path / "out")
    assert [one["name"] for one in json.loads((tmp_path / "out" / "cuda.json").read_text())] == ["1b"]
    assert "## 1b" in (tmp_path / "out" / "cuda.md").read_text()


def test_where_ours_cannot_be_made_nothing_is_measured() -> None:
    found = cuda.run(
        "smollm2", [Entrant("ours", failing), Entrant("a", lambda: Engine("a"))], Path(), (1,), 1
    )
    assert [bool(result.measured) for result in found.results] == [False, False]


def test_the_page_has_medians_and_names_who_is_missing() -> None:
    good = Result("ours", "its flags", Closeness(0.001, 0.98))
    for decode in (10.0, 30.0, 20.0):
        good.measured += measured((1, 8), decode)
    bad = Result("theirs", problem="out of memory")
    text = page(
        [ModelResults("1b", [1, 8], 3, [good, bad])], "NVIDIA H200, driver 580.159", MACHINE, ["vllm"]
    )
    assert "NVIDIA H200, driver 580.159" in text
    assert "| ours | 0.001 | 98.0% | 512.0 | 20.0 | 512.0 | 160.0 |" in text
    assert "512 prompt tokens and 128 greedy ones a stream" in text
    assert "- ours: its flags; engine 1" in text
    assert "- theirs: **not to the end**: out of memory" in text
    assert "- vllm did not install here." in text
