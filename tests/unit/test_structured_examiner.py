"""Hostile grammars in the process that tries them: refused within limits, and nobody else is harmed."""

from __future__ import annotations

import pytest

from llorch_serve.errors import LlorchError
from llorch_serve.structured.examiner import Examiner
from llorch_serve.structured.spec import Choice, Grammar, JsonSchema, Regex
from llorch_serve.structured.translate import translate
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.checkpoints import tiny_tokenizer_json

pytest.importorskip("llguidance")

SPECIAL = Tokenizer.from_json(tiny_tokenizer_json().encode(), origin="tiny").special_tokens


def chain(rules: int) -> str:
    lines = [f'r{i}: "b" r{i + 1} | "c"' for i in range(rules)]
    return "\n".join(["start: r0", *lines, f'r{rules}: "a"'])


@pytest.fixture(scope="module")
def examiner():
    made = Examiner(512, SPECIAL)
    yield made
    made.close()


@pytest.mark.parametrize(
    "form",
    [
        JsonSchema('{"type": "object", "properties": {"a": {"type": "string"}}}'),
        Regex("a{1,1000}"),
        Choice(("a", "b")),
        Grammar(f"start: {next(iter(SPECIAL.values()))}"),
        Grammar(chain(100)),
        Choice(tuple(f"option {i}" for i in range(4000))),
    ],
    ids=["schema", "regex", "choice", "special", "rules", "options"],
)
def test_an_honest_grammar_passes(examiner, form):
    assert examiner.refusal(translate(form)) is None


def test_what_would_overflow_the_stack_is_refused(examiner):
    reason = examiner.refusal(translate(Grammar(chain(6000))))
    assert reason is not None
    assert "nested too deeply" in reason
    assert examiner.refusal(translate(Regex("a"))) is None


def test_what_takes_too_long_is_refused_in_time():
    hasty = Examiner(512, SPECIAL, limit_s=0.5)
    try:
        reason = hasty.refusal(translate(JsonSchema('{"type": "integer", "multipleOf": 99999989}')))
        assert reason is not None
        assert "0.5 s" in reason
        assert hasty.refusal(translate(Regex("a"))) is None
    finally:
        hasty.close()


def test_what_takes_too_much_memory_is_refused():
    patient = Examiner(512, SPECIAL, limit_s=60, limit_bytes=32 * 2**20)
    try:
        reason = patient.refusal(translate(JsonSchema('{"type": "integer", "multipleOf": 99999989}')))
        assert reason is not None
        assert "32 MiB" in reason
    finally:
        patient.close()


def test_a_process_that_was_ended_from_outside_is_no_grammars_fault(examiner):
    assert examiner.refusal(translate(Regex("a"))) is None
    examiner._process.kill()
    examiner._process.wait()
    assert examiner.refusal(translate(Regex("b"))) is None


def test_a_process_that_was_killed_as_it_answered_is_asked_no_more(examiner, monkeypatch):
    """The time is over at the very moment of the answer: the next grammar would be blamed for the end."""

    def late(self, _pid, kill, _limit_s, answered):
        answered.wait()
        self._late = True
        kill()

    assert examiner.refusal(translate(Regex("a"))) is None
    with monkeypatch.context() as patch:
        patch.setattr(Examiner, "_watch", late)
        assert examiner.refusal(translate(Regex("b"))) is None
    assert examiner._process is None
    assert examiner.refusal(translate(Regex("c"))) is None


def test_a_process_that_does_not_start_is_no_grammars_fault(monkeypatch, tmp_path):
    """The caller has nothing to change: it is for whoever runs the worker."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    made = Examiner(512, SPECIAL)
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", str(broken))
        with pytest.raises(LlorchError, match="does not start"):
            made.refusal(translate(Regex("a")))
    assert made.refusal(translate(Regex("a"))) is None
    made.close()


def test_an_ended_examiner_starts_again(examiner):
    examiner.close()
    assert examiner.refusal(translate(Regex("a"))) is None
    examiner.close()
    examiner.close()
