"""Retinue: agent sessions as actors on Ray.

The public names. What is not here (or in :mod:`retinue.errors`, :mod:`retinue.events`,
:mod:`retinue.logs`, :mod:`retinue.providers` and :mod:`retinue.testing`) is private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retinue.abilities import Ability, AbilityBinding, PromptFragment
from retinue.agent_defaults import AgentDefaults, Limits
from retinue.agent_driver import agent_driver
from retinue.agents import Agent
from retinue.approvals import Approval, ApprovalRequest, Approvals
from retinue.budgets import Budgets, BudgetSnapshot, RoleLimits, Usage, UsageReport
from retinue.completion import CompletionCandidate, CompletionDecision, CompletionPolicy
from retinue.config import ModelBinding, RuntimeConfig
from retinue.context_policies import ContextPolicy, Conversation, Projection, Provenance
from retinue.controllers import Step, StepController, StepOverrides
from retinue.drivers import DriverCapabilities, ExecutionDriver, RunRequest
from retinue.grants import Grants
from retinue.handles import RunHandle
from retinue.hooks import SessionHooks, SessionInfo
from retinue.ids import Identity
from retinue.input_tool import request_input_tool
from retinue.messages import Message, ToolCall
from retinue.model_stream import ModelStream
from retinue.models import (
    FinishPiece,
    ModelCapabilities,
    ModelChunk,
    ModelClient,
    ModelRequest,
    ModelResponse,
    PublicItem,
    StreamingModelClient,
    TextPiece,
    ToolCallPiece,
    UsagePiece,
    capabilities_of,
)
from retinue.policies import CallUnderReview, Decision, ExecutionPolicy
from retinue.policy_context import PolicyContext
from retinue.prices import Price, PriceTable
from retinue.protocol import InputReply, Receipt
from retinue.reflection import reflection_policy
from retinue.resources import Resource
from retinue.results import DriverOutput, Reason, RunResult
from retinue.run_input import RUN_INPUT_LIMITS, parse_run_input, validate_run_input
from retinue.runtime import Runtime
from retinue.services import ExecutionServices
from retinue.snapshots import SessionSnapshot
from retinue.spans import open_telemetry
from retinue.summary_context import summary_context_policy
from retinue.team_driver import team_driver
from retinue.teams import Team
from retinue.telemetry import TelemetryContent, TelemetryEvent, TelemetryObserver
from retinue.tool_context import TaskContext, ToolContext
from retinue.tool_options import ToolOptions
from retinue.tools import Tool, tool

if TYPE_CHECKING:
    from retinue.cluster.connection import connect

__all__ = [
    "RUN_INPUT_LIMITS",
    "Ability",
    "AbilityBinding",
    "Agent",
    "AgentDefaults",
    "Approval",
    "ApprovalRequest",
    "Approvals",
    "BudgetSnapshot",
    "Budgets",
    "CallUnderReview",
    "CompletionCandidate",
    "CompletionDecision",
    "CompletionPolicy",
    "ContextPolicy",
    "Conversation",
    "Decision",
    "DriverCapabilities",
    "DriverOutput",
    "ExecutionDriver",
    "ExecutionPolicy",
    "ExecutionServices",
    "FinishPiece",
    "Grants",
    "Identity",
    "InputReply",
    "Limits",
    "Message",
    "ModelBinding",
    "ModelCapabilities",
    "ModelChunk",
    "ModelClient",
    "ModelRequest",
    "ModelResponse",
    "ModelStream",
    "PolicyContext",
    "Price",
    "PriceTable",
    "Projection",
    "PromptFragment",
    "Provenance",
    "PublicItem",
    "Reason",
    "Receipt",
    "Resource",
    "RoleLimits",
    "RunHandle",
    "RunRequest",
    "RunResult",
    "Runtime",
    "RuntimeConfig",
    "SessionHooks",
    "SessionInfo",
    "SessionSnapshot",
    "Step",
    "StepController",
    "StepOverrides",
    "StreamingModelClient",
    "TaskContext",
    "Team",
    "TelemetryContent",
    "TelemetryEvent",
    "TelemetryObserver",
    "TextPiece",
    "Tool",
    "ToolCall",
    "ToolCallPiece",
    "ToolContext",
    "ToolOptions",
    "Usage",
    "UsagePiece",
    "UsageReport",
    "agent_driver",
    "capabilities_of",
    "connect",
    "open_telemetry",
    "parse_run_input",
    "reflection_policy",
    "request_input_tool",
    "summary_context_policy",
    "team_driver",
    "tool",
    "validate_run_input",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # connect() brings Ray; whoever does not call it need not wait for that import.
    if name == "connect":
        from retinue.cluster.connection import connect

        return connect
    raise AttributeError(f"module 'retinue' has no attribute {name!r}")
