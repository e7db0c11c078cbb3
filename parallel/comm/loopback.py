"""Ranks that are all on one host talk over its loopback interface, where no other host reaches them.

Left alone, Gloo and NCCL listen on the interface that the host's name leads to, which is one of the network.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping

import psutil

INTERFACE_OF = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def all_on_one_host(environment: Mapping[str, str] = os.environ) -> bool:
    """True when what launched this rank says that no rank is elsewhere."""
    world = environment.get("WORLD_SIZE")
    return world is not None and environment.get("LOCAL_WORLD_SIZE") == world


def loopback_variables() -> dict[str, str]:
    """What keeps Gloo and NCCL on the loopback interface; nothing on a host that has none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(_is_loopback(each.address) for each in addresses):
            return dict.fromkeys(INTERFACE_OF, name)
    return {}


def stay_on_host() -> None:
    """Keep the groups of this process on the loopback interface, if that reaches all ranks; what is set goes before."""
    if all_on_one_host():
        for name, interface in loopback_variables().items():
            os.environ.setdefault(name, interface)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # of hardware
        return False
