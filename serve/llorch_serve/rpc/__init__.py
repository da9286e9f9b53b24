"""The worker over gRPC: ``worker.proto`` and its generated stubs, conversion, servicer and server."""

from __future__ import annotations

from typing import Final

SERVICE_NAME: Final = "llorch.v1.GenerationService"

MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""Largest message that worker and client send or take: 16 MiB, where gRPC's own default is 4 MiB.

A larger request ends with RESOURCE_EXHAUSTED, whose text states its size and this limit.
"""
