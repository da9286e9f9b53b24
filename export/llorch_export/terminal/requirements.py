"""Turning a missing library into the line that installs it, as the worker's commands do."""

from __future__ import annotations

from llorch_serve.terminal.requirements import required as required
