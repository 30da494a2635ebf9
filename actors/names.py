"""What the actors are called. Everything but the registry carries the protocol version in its name."""

from __future__ import annotations

from retinue.ids import PROTOCOL_VERSION

NAMESPACE = "retinue"
"""The Ray namespace, unless told otherwise."""
REGISTRY = "retinue.registry"
"""The one unversioned name: it lists the versions that stand."""

_PREFIX = f"retinue.v{PROTOCOL_VERSION}"
DIRECTORY = f"{_PREFIX}.directory"
HOST_PREFIX = f"{_PREFIX}.host."
CHILD_HOST_PREFIX = f"{_PREFIX}.child."
STORE_PREFIX = f"{_PREFIX}.store."
KEEPER_PREFIX = f"{_PREFIX}.keeper."


def host_name(host_id: str) -> str:
    return HOST_PREFIX + host_id


def child_host_name(host_id: str) -> str:
    return CHILD_HOST_PREFIX + host_id


def store_name(key: str) -> str:
    return STORE_PREFIX + key


def keeper_name(digest: str) -> str:
    return KEEPER_PREFIX + digest[:32]
