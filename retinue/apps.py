"""Apps: a configuration and how it reaches the processes that run it."""

from __future__ import annotations

import hashlib
import importlib
import pickle
from typing import Literal, get_args

import msgspec

from retinue.config import RuntimeConfig
from retinue.delegates import pickle_value
from retinue.errors import RetinueError, ValidationFailed

Isolation = Literal["dedicated", "shared"]
"""``dedicated``: every session has a process of its own. ``shared``: many sessions live in one process."""


class AppSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration by value (pickled once) or by the name of a factory; addressed by its digest."""

    kind: Literal["value", "name"]
    digest: str
    """Hex SHA-256 of ``isolation`` and ``data``."""
    data: bytes
    """The pickled configuration, or ``module:factory``."""
    name: str
    """What listings show and records keep."""
    isolation: Isolation = "dedicated"
    """How its sessions live on a cluster."""


def app_by_value(config: RuntimeConfig, isolation: Isolation = "dedicated") -> AppSpec:
    """A configuration as bytes. Raises :class:`NotShippable`, naming the member at fault."""
    data = pickle_value(config, "config")
    digest = _digest(data, isolation)
    name = config.name or f"by-value:{digest[:12]}"
    return AppSpec(kind="value", digest=digest, data=data, name=name, isolation=isolation)


def app_by_name(target: str, isolation: Isolation = "dedicated") -> AppSpec:
    """A configuration by the name of its factory, ``package.module:factory``."""
    module, _, factory = target.partition(":")
    if not module or not factory:
        raise ValidationFailed(
            f"app {target!r} must be written module:factory, such as my_service.agents:make_config",
            path="app",
        )
    data = target.encode()
    digest = _digest(data, isolation)
    return AppSpec(kind="name", digest=digest, data=data, name=target, isolation=isolation)


def check_isolation(isolation: object) -> None:
    """Raise :class:`ValidationFailed` unless it is ``"dedicated"`` or ``"shared"``."""
    if isolation not in get_args(Isolation):
        raise ValidationFailed(
            f"isolation is {isolation!r:.80}; give 'dedicated' (each session in a process of its own) or "
            "'shared' (many sessions in one process)",
            path="isolation",
        )


def _digest(data: bytes, isolation: Isolation) -> str:
    return hashlib.sha256(isolation.encode() + b"\0" + data).hexdigest()


def load_app(spec: AppSpec) -> RuntimeConfig:
    """The configuration, unpickled or made by its factory in this process.

    Raises:
        ValidationFailed: the module or factory is not there, or gives something else.
    """
    if spec.kind == "name":
        return _from_factory(spec.data.decode())
    try:
        config = pickle.loads(spec.data)  # noqa: S301 - what a client of this cluster brought, never stored
    except Exception as error:
        raise ValidationFailed(
            f"the app {spec.name} cannot be loaded in this process: {type(error).__name__}: {error}. Modules "
            "that it imports must be installed where the runtime's processes run",
            path="config",
        ) from None
    if not isinstance(config, RuntimeConfig):
        raise ValidationFailed(
            f"the app {spec.name} is {type(config).__name__}, not a RuntimeConfig", path="config"
        )
    return config


def _from_factory(target: str) -> RuntimeConfig:
    module_name, _, factory_name = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ValidationFailed(f"app {target!r} cannot be imported: {error}", path="app") from None
    try:
        config = factory()
    except RetinueError:
        raise
    except Exception as error:
        raise ValidationFailed(
            f"app {target!r} raised {type(error).__name__}: {error} while making its configuration",
            path="app",
        ) from error
    if not isinstance(config, RuntimeConfig):
        raise ValidationFailed(
            f"app {target!r} gave {type(config).__name__}, not a RuntimeConfig", path="app"
        )
    return config
