"""A replica whose requests become spans, in the traces that fronts and their callers began.

Input: the settings of a replica, which name where spans go. Output: a replica as Ray makes one, with a tracer
around its worker if they do.
"""

from __future__ import annotations

from llorch_serve.cluster.actor import Observe, ReplicaActor
from llorch_serve.cluster.settings import ReplicaSettings
from llorch_serve.errors import UsageError
from llorch_serve.observe.tap import ObservedGenerator


class ObservedReplica(ReplicaActor):
    """A replica that sends spans where its settings say, and none where they do not."""

    def observation(self, settings: ReplicaSettings, name: str) -> Observe | None:
        """Return what puts a tracer around the worker. Raises UsageError where its library is missing."""
        return find_observation(settings.otlp_endpoint, settings.version, name)


def find_observation(endpoint: str | None, version: str, name: str) -> Observe | None:
    """Return what puts a tracer around a generator; None where no endpoint is given. name: the replica's.

    Raises UsageError where the library of traces is missing.
    """
    if endpoint is None:
        return None
    try:
        from llorch_serve.observe.traces import Tracer, otlp_provider
    except ImportError as error:
        raise UsageError(
            f"otlp_endpoint is {endpoint}, and this node cannot send spans ({error}); pip install "
            "'llorch[otel]' there"
        ) from error
    provider = otlp_provider(endpoint, version, instance=name)
    return lambda inner: ObservedGenerator(inner, [Tracer(provider, lambda: inner.model_info().model_id)])
