"""``llorch frontier`` on a tiny model: a table, a document, a picture; refusals in one line."""

from __future__ import annotations

import pytest

from support.builders.checkpoints import write_gguf
from support.harness.processes import llorch_here

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def few_recipes(monkeypatch):
    """Fewer recipes than the command measures for people; the first is the least divergent, the last the
    smallest.
    """
    from llorch_export.frontier import measure as frontier

    whole = frontier.candidates
    kept = ("fp16", "int8", "int4 b32", "int4 b64 head int4")
    monkeypatch.setattr(
        frontier, "candidates", lambda source: [pair for pair in whole(source) if pair[0] in kept]
    )
    monkeypatch.setattr(frontier, "MAX_TOKENS", 100)


def test_points_are_sorted_by_size_and_diverge_less_with_more_bits(tiny_source, tmp_path):
    peer = write_gguf(tmp_path / "same.gguf", weight_type="Q8_0")
    other = write_gguf(tmp_path / "f32.gguf")
    document = llorch_here(
        "frontier", tiny_source, "--compare", peer, "--compare", other, "--json"
    ).document()
    points = document["points"]
    bits = {point["label"]: point["bits_per_weight"] for point in points}
    kl = {point["label"]: point["kl"] for point in points}
    assert list(bits.values()) == sorted(bits.values())
    # 5 norms of 64 in float32 stand beside the matrices.
    norms, parameters = 5 * 64, 2 * 512 * 64 + 2 * (3 * 64 * 64 + 3 * 64 * 96) + 5 * 64
    share = norms / parameters
    assert bits["int8"] == pytest.approx(9 * (1 - share) + 32 * share)
    assert bits["same.gguf"] == pytest.approx(8.5 * (1 - share) + 32 * share)
    assert bits["f32.gguf"] == 32
    assert bits["fp16"] == 16
    assert kl["fp16"] < kl["int8"]
    assert kl["f32.gguf"] < 1e-6 < kl["same.gguf"] < kl["int4 b32"] < kl["int4 b64 head int4"]
    assert kl["int8"] < kl["int4 b32"]
    assert {point["label"] for point in points if point["series"] != "llorch"} == {"same.gguf", "f32.gguf"}


def test_a_table_on_stdout_and_a_picture(tiny_source, tmp_path):
    picture = tmp_path / "frontier.png"
    text = tmp_path / "text.txt"
    text.write_text("Paris is the capital of France, and 東京 is not. " * 9)
    outcome = llorch_here("frontier", tiny_source, "--text", text, "--png", picture)
    assert outcome.code == 0
    header, _rule, *rows = outcome.stdout.splitlines()
    assert header == "| | bits per weight | KL, nats | top-1 |"
    assert len(rows) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_used_is_refused_by_name(tiny_source, tmp_path):
    missing = llorch_here("frontier", tiny_source, "--text", tmp_path / "none.txt")
    assert missing.code == 2
    assert "none.txt cannot be read" in missing.stderr
    (tmp_path / "empty.txt").write_text("")
    empty = llorch_here("frontier", tiny_source, "--text", tmp_path / "empty.txt")
    assert empty.code == 3
    assert "choose another --text" in empty.stderr
    wider = write_gguf(tmp_path / "wider.gguf", {"vocab_size": 640})
    outcome = llorch_here("frontier", tiny_source, "--compare", wider)
    assert outcome.code == 3
    assert "640 tokens" in outcome.stderr
    assert "512" in outcome.stderr
