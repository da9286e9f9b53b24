"""``ci/bench-depths``: what it takes, the longer context of its model, and its section of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench_peers import depths
from bench_peers import page as bench_page
from bench_peers.contestant import Closeness, Work
from bench_peers.depths import CONTEXT, Setting, parse_setting, section, with_context
from bench_peers.models import PeersFolder
from bench_peers.page import PAGE, put
from bench_peers.protocol import Arrivals, Engine, Measurement, Task, encode, measure, parse_measurements
from bench_peers.results import Machine
from llorch_export.source.open import open_checkpoint
from llorch_serve.errors import UsageError
from support.builders.checkpoints import write_gguf


@pytest.mark.parametrize("text", ["4096", "x8", "4096x0", "0x1", "4096 x 8", "-1x1", "127x1", f"{CONTEXT}x1"])
def test_runs_that_cannot_be_measured_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--run is"):
        parse_setting(text)


def test_a_run_is_a_depth_and_a_number_of_streams() -> None:
    assert parse_setting("4096x8") == Setting(4096, 8)
    assert (str(Setting(4096, 8)), str(Setting(16384, 1))) == (
        "4,096 tokens, 8 streams",
        "16,384 tokens, 1 stream",
    )


def test_the_model_is_given_more_positions_and_stays_as_it_is_otherwise(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    before = source.read_bytes()
    longer = with_context(source, tmp_path / "made" / "model.gguf", CONTEXT)
    one, other = open_checkpoint(str(source)), open_checkpoint(str(longer))
    assert other.config.max_position_embeddings == CONTEXT != one.config.max_position_embeddings
    assert source.read_bytes() == before
    assert sum(a != b for a, b in zip(before, longer.read_bytes(), strict=True)) <= 4
    made = longer.stat().st_mtime_ns
    assert with_context(source, longer, CONTEXT).stat().st_mtime_ns == made, "what is there is not made again"


def test_llama_cpp_has_a_cache_of_either_type(tmp_path: Path) -> None:
    f16, q8, openvino = depths.peers(PeersFolder(tmp_path), tmp_path / "m.gguf")
    assert (f16.cache, q8.cache, openvino.cache) == ("f16", "q8_0", "u8")
    assert f16.model == q8.model == tmp_path / "m.gguf"
    assert f16.made == q8.made == "the GGUF file as it is (Q4_1), flash attention"
    assert len({f16.label, q8.label, openvino.label}) == 3


@pytest.mark.parametrize("warm_up", [False, True])
def test_behind_filled_contexts_decoding_alone_is_timed(warm_up: bool) -> None:
    runs = []

    def run(streams: int) -> Arrivals:
        runs.append(streams)
        arrivals = Arrivals(streams)
        arrivals.times = [[0.5, 1.0, 1.5] for _ in range(streams)]
        return arrivals

    task = Task("m", 2, ((1, 2), (3, 2)), new_tokens=3, streams=(2,), filled=True, warm_up=warm_up)
    (found,) = measure(Engine("e", "1", "w", run), task)
    assert runs == [2] * (1 + warm_up)
    assert (found.prefill_tokens_per_s, found.decode_tokens_per_s) == (None, 4.0)
    assert parse_measurements(encode(found)) == [found]


class Named:
    def __init__(self, label: str, *, ours: bool) -> None:
        self.label, self.ours, self.made = label, ours, "by hand"


def speed(prefill: float | None, decode: float, streams: int) -> list[Measurement]:
    one = Measurement("e", "1", "w", streams, 128, 4, prefill, decode, 9.0)
    return [replace(one, decode_tokens_per_s=decode * drift) for drift in (1, 0.5, 2)]


def test_our_fastest_is_held_against_the_fastest_peer_of_those_near_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [
        Named("slow", ours=True),
        Named("fast", ours=True),
        Named("f16", ours=False),
        Named("q8", ours=False),
        Named("far", ours=False),
    ]
    close = {one.label: Closeness(0.5 if one.label == "far" else 0.003, 0.95) for one in engines}
    single = {"slow": 10.0, "fast": 13.0, "f16": 10.0, "q8": 8.0, "far": 99.0}
    many = {"slow": 50.0, "fast": 40.0, "f16": 45.0, "q8": 25.0, "far": 99.0}
    work = Work(tuple(range(128)), Path("x"), 4, (1,), 1, 2)
    found = [
        (Setting(4096, 1), work, {label: speed(100.0, decode, 1) for label, decode in single.items()}),
        (Setting(4096, 8), work, {label: speed(None, decode, 8) for label, decode in many.items()}),
    ]
    text = section(Machine("A CPU", 2, [], 16, "Linux", 0.1), found, close, engines)  # type: ignore[arg-type]
    assert "| fast | 0.003 | 95.0% | 100.0 | 13.0 | 9 |" in text
    assert "| slow | 0.003 | 95.0% | 50.0 | 9 |" in text
    assert "| decode, 4,096 tokens, 1 stream | fast to f16 | >= 1.2 | 1.30 (1.30 to 1.30) | yes |" in text
    assert "| decode, 4,096 tokens, 8 streams | slow to f16 | >= 1.2 | 1.11 (1.11 to 1.11) | **no** |" in text
    assert "| prefill, 4,096 tokens, 1 stream | slow to f16 |  | 1.00 (1.00 to 1.00) |  |" in text
    assert "prefill, 4,096 tokens, 8 streams" not in text
    assert "2 threads, 3 rounds" in text
    page = tmp_path / "performance.md"
    page.write_text(PAGE.read_text(encoding="utf-8"))
    monkeypatch.setattr(bench_page, "PAGE", page)
    for vendor in ("Some", "Another"):
        put(text, Machine("A CPU", 2, [], 16, "Linux", 0.1, vendor), by="ci/bench-depths")
    assert page.read_text(encoding="utf-8").count("| fast | 0.003 | 95.0% | 100.0 | 13.0 | 9 |") == 2, (
        "each kind of machine keeps its own"
    )


def test_without_a_peer_near_the_reference_nothing_is_claimed() -> None:
    engines = [Named("ours", ours=True), Named("far", ours=False)]
    close = {"ours": Closeness(0.003, 0.95), "far": Closeness(0.3, 0.7)}
    work = Work(tuple(range(128)), Path("x"), 4, (1,), 1, 2)
    of = {"ours": speed(100.0, 10.0, 1), "far": speed(100.0, 1.0, 1)}
    text = section(Machine("A CPU", 2, [], 16, "Linux", 0.1), [(Setting(4096, 1), work, of)], close, engines)  # type: ignore[arg-type]
    assert "| decode, 4,096 tokens, 1 stream | nothing | >= 1.2 | not measured | **no** |" in text
