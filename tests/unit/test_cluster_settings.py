"""What a replica is started with goes to another process and back, and equal settings are equal bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llorch_serve.cluster.settings import ReplicaSettings, StageShare, read_settings
from llorch_serve.config import CacheSharing, EngineConfig, SessionConfig
from llorch_serve.providers import ProviderChoice

ENGINE = EngineConfig(
    session=SessionConfig(
        threads=2, kv_dtype="int8", provider=ProviderChoice("cuda", ("device_id=0",), Path("/lib/x.so"))
    ),
    max_waiting=7,
    draft=Path("/models/small"),
    cache_sharing=CacheSharing.CLIENT,
    served_names=("a", "b"),
)


def settings(**changes: object) -> ReplicaSettings:
    given = {
        "model": "m",
        "artifact": "/models/m",
        "fingerprint": "f" * 64,
        "version": "0.1.0",
        "cores": 2,
        "engine": ENGINE,
    }
    return ReplicaSettings(**(given | changes))


def test_settings_are_read_as_they_were_written():
    assert read_settings(settings().encode()) == settings()
    staged = settings(stages=StageShare(count=2, cores=1, gpus=0.5, memory_bytes=1))
    assert read_settings(staged.encode()) == staged


def test_equal_settings_have_one_digest_and_each_change_another():
    changed = [
        settings(artifact="/other"),
        settings(fingerprint="0" * 64),
        settings(version="0.2.0"),
        settings(cores=3),
        settings(engine=replace(ENGINE, max_waiting=8)),
        settings(stages=StageShare(count=2, cores=1)),
        settings(stages=StageShare(count=2, cores=1, gpus=0.5, memory_bytes=1)),
    ]
    assert settings().digest == settings().digest
    assert len({one.digest for one in [settings(), *changed]}) == 1 + len(changed)
