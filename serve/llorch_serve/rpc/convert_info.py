"""The bridge between protobuf messages and plain types: what a worker says of its model and of how busy it
is.
"""

from __future__ import annotations

from typing import Final

from llorch_serve.engine.load import Load, WorkerState
from llorch_serve.providers import ProviderShare
from llorch_serve.requests import ModelInfo
from llorch_serve.rpc import worker_pb2 as pb

_LOAD_FIELDS: Final = tuple(name for name in Load.__dataclass_fields__ if name not in ("state", "stages"))
_STATE_TO_WIRE: Final = {
    WorkerState.STARTING: pb.WORKER_STATE_STARTING,
    WorkerState.READY: pb.WORKER_STATE_READY,
    WorkerState.BUSY: pb.WORKER_STATE_BUSY,
    WorkerState.DRAINING: pb.WORKER_STATE_DRAINING,
    WorkerState.STOPPED: pb.WORKER_STATE_STOPPED,
    WorkerState.FAILED: pb.WORKER_STATE_FAILED,
}
_STATE_FROM_WIRE: Final = {wire: state for state, wire in _STATE_TO_WIRE.items()}


def write_load(load: Load) -> pb.GetLoadResponse:
    """Return the message."""
    figures = {name: getattr(load, name) for name in _LOAD_FIELDS}
    return pb.GetLoadResponse(state=_STATE_TO_WIRE[load.state], **figures)


def read_load(message: pb.GetLoadResponse) -> Load:
    """Return the figures; a worker that states none, or one that this client does not know, counts as
    ready.
    """
    figures = {name: getattr(message, name) for name in _LOAD_FIELDS}
    return Load(state=_STATE_FROM_WIRE.get(message.state, WorkerState.READY), **figures)


_MODEL_INFO_FIELDS: Final = tuple(
    name
    for name in ModelInfo.__dataclass_fields__
    if name not in ("stop_token_ids", "limits", "provider_shares", "served_names", "capabilities")
)


def write_model_info(info: ModelInfo) -> pb.GetModelInfoResponse:
    """Return the message."""
    plain = {name: getattr(info, name) for name in _MODEL_INFO_FIELDS}
    shares = [
        pb.ProviderShare(
            provider=share.provider, node_share=share.node_share, weight_share=share.weight_share
        )
        for share in info.provider_shares
    ]
    return pb.GetModelInfoResponse(
        stop_token_ids=info.stop_token_ids,
        limits=info.limits,
        provider_shares=shares,
        served_names=info.served_names,
        capabilities=info.capabilities,
        **plain,
    )


def read_model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    """Return what the message says."""
    plain = {name: getattr(message, name) for name in _MODEL_INFO_FIELDS}
    shares = tuple(
        ProviderShare(share.provider, share.node_share, share.weight_share)
        for share in message.provider_shares
    )
    return ModelInfo(
        stop_token_ids=tuple(message.stop_token_ids),
        limits=tuple(message.limits),
        provider_shares=shares,
        served_names=tuple(message.served_names),
        capabilities=tuple(message.capabilities),
        **plain,
    )
