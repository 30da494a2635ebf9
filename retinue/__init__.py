"""Retinue: agent sessions as actors on Ray.

The public names. What is not here (or in :mod:`retinue.errors`, :mod:`retinue.events`,
:mod:`retinue.providers` and :mod:`retinue.testing`) is private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retinue.agent_loop import agent_driver
from retinue.agents import Agent
from retinue.budgets import Budgets, BudgetSnapshot, Usage
from retinue.config import ModelBinding, RuntimeConfig
from retinue.drivers import DriverCapabilities, ExecutionDriver, RunRequest
from retinue.grants import Grants
from retinue.handles import RunHandle
from retinue.ids import Identity
from retinue.messages import Message, ToolCall
from retinue.models import ModelClient, ModelRequest, ModelResponse
from retinue.results import DriverOutput, Reason, RunResult
from retinue.runtime import Runtime
from retinue.services import ExecutionServices
from retinue.sessions import SessionSnapshot
from retinue.team_driver import team_driver
from retinue.teams import Team
from retinue.tool_calls import ToolContext
from retinue.tools import Tool, tool

if TYPE_CHECKING:
    from retinue.cluster.connection import connect

__all__ = [
    "Agent",
    "BudgetSnapshot",
    "Budgets",
    "DriverCapabilities",
    "DriverOutput",
    "ExecutionDriver",
    "ExecutionServices",
    "Grants",
    "Identity",
    "Message",
    "ModelBinding",
    "ModelClient",
    "ModelRequest",
    "ModelResponse",
    "Reason",
    "RunHandle",
    "RunRequest",
    "RunResult",
    "Runtime",
    "RuntimeConfig",
    "SessionSnapshot",
    "Team",
    "Tool",
    "ToolCall",
    "ToolContext",
    "Usage",
    "agent_driver",
    "connect",
    "team_driver",
    "tool",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # connect() brings Ray; whoever does not call it need not wait for that import.
    if name == "connect":
        from retinue.cluster.connection import connect

        return connect
    raise AttributeError(f"module 'retinue' has no attribute {name!r}")
