"""Flags of an engine reach its settings."""

from __future__ import annotations

from pathlib import Path

from llorch_serve.config import DEFAULT_PREFILL_CHUNK, EngineConfig, SessionConfig
from llorch_serve.terminal.session_flags import EngineFlags


def test_a_step_takes_as_many_prompt_tokens_as_is_said_and_else_the_engines_own_number() -> None:
    session = SessionConfig(threads=1)
    assert EngineFlags(prefill_chunk=128).config(session) == EngineConfig(session, prefill_chunk=128)
    assert EngineFlags().config(session).prefill_chunk == DEFAULT_PREFILL_CHUNK


def test_a_draft_is_found_from_wherever_the_model_is_loaded() -> None:
    session = SessionConfig(threads=1)
    assert EngineFlags(draft=Path("small")).config(session).draft == Path.cwd() / "small"
    assert EngineFlags().config(session).draft is None
