"""Where a graph's nodes and weights really run, and the refusal of a graph that runs elsewhere than was asked
for.

Input is what onnxruntime recorded while it divided the graph among providers, before its last fusions, so
nodes have the names that they have in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llorch_serve.errors import ProviderError
from llorch_serve.providers.table import CPU


@dataclass(frozen=True, slots=True)
class ProviderShare:
    """What one provider has. node_share, weight_share: of the nodes, and of the bytes of weights, 0..1.

    operators: its operators and how many nodes each has, the most frequent first.
    """

    provider: str
    node_share: float
    weight_share: float
    operators: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the graph runs. node_share: part of the nodes on ``provider``, 0..1. shares: of every provider,
    that one first.

    device: that provider's, like ``cuda:1``.
    """

    provider: str
    node_share: float
    shares: tuple[ProviderShare, ...] = ()
    device: str = "cpu"


def averaged(places: Sequence[Placement]) -> Placement:
    """Return where the nodes of all stages run: the mean of their shares, as stages are of about one size."""
    names = dict.fromkeys(share.provider for place in places for share in place.shares)

    def mean(name: str, field: str) -> float:
        found = [getattr(s, field) for place in places for s in place.shares if s.provider == name]
        return float(sum(found)) / len(places)

    shares_ = tuple(
        ProviderShare(name, mean(name, "node_share"), mean(name, "weight_share")) for name in names
    )
    return Placement(
        places[0].provider,
        sum(place.node_share for place in places) / len(places),
        shares_,
        ", ".join(dict.fromkeys(place.device for place in places)),
    )


def describe_shares(shares: Sequence[ProviderShare]) -> str:
    """Return a phrase for people, like ``91.0% of nodes and 84.2% of weights on X, ...``."""
    return ", ".join(
        f"{share.node_share:.1%} of nodes and {share.weight_share:.1%} of weights on {share.provider}"
        for share in shares
    )


def placement(
    session: Any, provider: str, *, graph: Path | None = None, allow_cpu_nodes: bool = True
) -> Placement:
    """Return where the nodes of a session run.

    The session must have been made with ``session.record_ep_graph_assignment_info``.
    graph: its file, which tells how much each node has of the weights; without it weights are counted like
        nodes.
    Raises ProviderError if the runtime chose another provider, or some nodes are on another and that is not
    allowed.
    """
    providers = session.get_providers()
    if not providers or providers[0] != provider:
        raise ProviderError(f"{provider} was asked for and the runtime uses {', '.join(providers) or 'none'}")
    nodes: dict[str, list[tuple[str, str]]] = {}
    for part in session.get_provider_graph_assignment_info():
        nodes.setdefault(part.ep_name, []).extend((node.name, node.op_type) for node in part.get_nodes())
    if not nodes:
        return _unrecorded(provider, providers, allow_cpu_nodes=allow_cpu_nodes)
    found = _shares(provider, nodes, graph)
    if not allow_cpu_nodes and set(nodes) != {provider}:
        raise ProviderError(_elsewhere(provider, found))
    return found


def _unrecorded(provider: str, providers: list[str], *, allow_cpu_nodes: bool) -> Placement:
    """Return what is known where the runtime recorded nothing: all of it, if there is but one provider."""
    if providers == [provider]:
        return Placement(provider, 1.0, (ProviderShare(provider, 1.0, 1.0),))
    if not allow_cpu_nodes:
        raise ProviderError(
            f"this onnxruntime does not record which nodes {provider} runs, so it cannot be told whether "
            f"all do; "
            "use a later release, or accept that with --allow-cpu-nodes"
        )
    return Placement(provider, 0.0)


def _shares(provider: str, nodes: Mapping[str, list[tuple[str, str]]], graph: Path | None) -> Placement:
    total = sum(map(len, nodes.values()))
    weights: Mapping[str, Mapping[str, int]] = {}
    if graph is not None and len(nodes) > 1:
        from llorch_serve.providers.graph_weights import weights_of_nodes  # loads protobuf: on demand

        weights = weights_of_nodes(graph)
    held = {
        name: sum({key: size for node, _ in found for key, size in weights.get(node, {}).items()}.values())
        for name, found in nodes.items()
    }
    everything = sum(held.values())
    shares = [
        ProviderShare(
            name,
            len(found) / total,
            held[name] / everything if everything else len(found) / total,
            tuple(Counter(operator for _, operator in found).most_common()),
        )
        for name, found in nodes.items()
    ]
    shares.sort(key=lambda share: (share.provider != provider, share.provider == CPU, share.provider))
    mine = next((share.node_share for share in shares if share.provider == provider), 0.0)
    return Placement(provider, mine, tuple(shares))


def _elsewhere(provider: str, found: Placement) -> str:
    others = "; ".join(
        f"{share.provider} has "
        + ", ".join(f"{count} {operator}" for operator, count in share.operators[:8])
        + f" ({share.node_share:.1%} of nodes, {share.weight_share:.1%} of weights)"
        for share in found.shares
        if share.provider != provider
    )
    return (
        f"{provider} was asked for and does not run the whole graph: {others}; "
        "export for a target that fits it, or accept that with --allow-cpu-nodes"
    )
