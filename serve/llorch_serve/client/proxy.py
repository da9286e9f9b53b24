"""Proxies that the environment puts between a client and its worker, by gRPC's own rules.

gRPC sends calls to the machine itself through a proxy too, where nobody wants them. Input: an address, and
the environment. Output: whether it is on this machine, and the variable that names the proxy.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Final

DIRECT: Final = ("grpc.enable_http_proxy", 0)
"""The channel's option that leaves proxies out."""

_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")  # the first that is set counts
_EXCEPTIONS: Final = ("no_grpc_proxy", "no_proxy")
_SCHEME: Final = re.compile(r"(dns:(//[^/]*/)?|ipv4:|ipv6:|/{0,3})")


def is_loopback(address: str) -> bool:
    """Tell whether a worker's address is on this machine."""
    host = host_of(address)
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def proxy_variable(address: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable that names the proxy through which a worker is called; None: it is called
    directly.
    """
    name = next((name for name in _PROXIES if environment.get(name)), None)
    if name is None or is_loopback(address):
        return None
    exceptions = next((found for each in _EXCEPTIONS if (found := environment.get(each))), "")
    host = host_of(address)
    return None if any(_covers(entry.strip(), host) for entry in exceptions.split(",")) else name


def host_of(address: str) -> str:
    """Return the host of HOST:PORT, in lower case and without brackets."""
    found = _SCHEME.match(address)
    host = address[found.end() if found else 0 :].rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]").lower()


def _covers(entry: str, host: str) -> bool:
    """Tell whether an entry of no_proxy is about a host: the end of its name, or a network that it is in."""
    if not entry:
        return False
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return host.endswith(entry.lower())
