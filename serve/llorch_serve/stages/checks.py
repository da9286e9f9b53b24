"""Whether a choice of places for stages can have its effect, before anything is loaded."""

from __future__ import annotations

import sys
from typing import Final

from llorch_serve.config import SessionConfig, StageChoice
from llorch_serve.errors import UsageError
from llorch_serve.providers.table import PROVIDERS, find_provider

_DEVICE_OPTIONS: Final = ("device_id", "deviceId")


def check_choice(config: SessionConfig, stages: int, *, platform: str = sys.platform) -> None:
    """Raise UsageError where ``config.stages`` does not fit so many stages, the provider or this system."""
    choice = config.stages
    if choice.processes and platform == "win32":
        raise UsageError(
            "--stage-processes needs sockets that processes inherit, which Windows has not; leave it out, "
            "and the stages run in one process"
        )
    if not choice.devices:
        return
    if len(choice.devices) != stages:
        raise UsageError(
            f"--stage-device names {len(choice.devices)} devices and the artifact has {stages} stages; name "
            f"one for each, like {','.join(map(str, range(stages)))}"
        )
    option = device_option(config.provider.name)
    if any(each.partition("=")[0].strip() in _DEVICE_OPTIONS for each in config.provider.options):
        raise UsageError(
            f"--provider-option {option} and --stage-device both name devices; leave the option out"
        )


def refuse_choice(choice: StageChoice, folder: object) -> None:
    """Raise UsageError for a choice of places where there is one graph of all layers."""
    for flag, given in (("--stage-device", choice.devices), ("--stage-processes", choice.processes)):
        if given:
            raise UsageError(
                f"{flag} has no effect on {folder}, whose model is not cut into stages; leave it out, or "
                f"export the model with --stages N"
            )


def device_option(name: str | None) -> str:
    """Return the option by which a provider is told its device. name: as ``--provider`` takes it.

    Raises UsageError for a provider that has no devices to choose from.
    """
    row = find_provider(name or "cpu")
    found = next((option for option in _DEVICE_OPTIONS if option in row.options), None)
    if found is None:
        able = [each.name for each in PROVIDERS if any(option in each.options for option in _DEVICE_OPTIONS)]
        raise UsageError(
            f"--stage-device is for providers with several devices ({', '.join(able)}) and {row.name} has "
            f"one; leave it out, or give each stage cores of its own with --stage-processes"
        )
    return found
