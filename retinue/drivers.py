"""The driver seam: what runs inside a run (contract section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from retinue.errors import Unsupported, ValidationFailed
from retinue.grants import Grants
from retinue.ids import Identity
from retinue.messages import Content
from retinue.results import DriverOutput

if TYPE_CHECKING:
    from retinue.services import ExecutionServices

RunMode = Literal["execute", "plan"]
ControlMode = Literal["follow_up", "steer", "replace"]


@dataclass(frozen=True, kw_only=True)
class DriverCapabilities:
    """What a driver offers, declared truthfully; what cannot be kept is refused at construction."""

    controls: Sequence[ControlMode] = ()
    durable: bool = False
    policy_coverage: Literal["local", "remote", "none"] = "local"
    """``local``: every effect of the driver goes through the services."""
    controlled_execution: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "controls", tuple(self.controls))


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver is asked to do."""

    input: Content
    identity: Identity
    session_id: str
    """For a delegate a label, ``<session>:<name>``, never a session that could be opened."""
    run_id: str
    attempt_id: str
    parent_run_id: str | None = None
    root_run_id: str
    participant: str = ""
    """Name of the delegate; empty for the root."""
    depth: int = 0
    """Delegates above this one; 0 for the root, 1 for its delegates."""
    deadline: float | None = None
    """Epoch seconds."""
    grants: Grants
    run_mode: RunMode = "execute"
    resumes: str | None = None
    """Id of the run that this one goes on with; its input is in history already. ``None`` for a new task."""
    trace: dict[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context of the run or delegate."""


@runtime_checkable
class ExecutionDriver(Protocol):
    """Something that does the work of a run, as plain data that can be copied into another process."""

    @property
    def id(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def capabilities(self) -> DriverCapabilities: ...

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput: ...


def check_driver(driver: object) -> ExecutionDriver:
    """The driver, if its shape and its promises can be accepted (contract section 5).

    Raises:
        ValidationFailed: no driver, no id, or a version below 1.
        Unsupported: it declares something that cannot be kept; ``operation`` names it.
    """
    if not isinstance(driver, ExecutionDriver):
        raise ValidationFailed(
            f"config.driver {driver!r:.80} has no id, version, capabilities and start(); "
            "use agent_driver(...), team_driver(...) or an ExecutionDriver",
            path="config.driver",
        )
    driver_id: object = driver.id
    if not isinstance(driver_id, str) or not driver_id:
        raise ValidationFailed("config.driver.id must be a nonempty string", path="config.driver.id")
    version: object = driver.version
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValidationFailed("config.driver.version must be an integer ≥ 1", path="config.driver.version")
    capabilities = driver.capabilities
    for operation, refused in (
        ("durable", capabilities.durable),
        ("replace", "replace" in capabilities.controls),
        ("policy_coverage", capabilities.policy_coverage != "local"),
        ("controlled_execution", capabilities.controlled_execution is not True),
    ):
        if refused:
            raise Unsupported(
                f"driver {driver.id}: {operation} as declared is not supported", operation=operation
            )
    return driver
