"""The configuration of a runtime: what runs, what it may use, what it may spend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict, get_args

from retinue.abilities import Ability, check_abilities
from retinue.agent_defaults import AgentDefaults, Limits, check_project_root
from retinue.approvals import Approvals
from retinue.budgets import Budgets
from retinue.clocks import check_seconds
from retinue.completion import CompletionPolicy
from retinue.context_policies import ContextPolicy
from retinue.controllers import StepController
from retinue.drivers import ExecutionDriver, check_driver
from retinue.errors import ValidationFailed
from retinue.event_log import DEFAULT_CAPACITY, check_capacity
from retinue.grants import Grants
from retinue.hooks import SessionHooks
from retinue.models import ModelClient, ModelRequest
from retinue.policies import ExecutionPolicy
from retinue.prices import PriceTable
from retinue.telemetry import TelemetryObserver, check_observers
from retinue.tools import Tool, check_kind, check_tools

ToolBatches = Literal["first_n", "all_or_nothing"]
EstimateInputTokens = Callable[[ModelRequest, ModelClient], int]


@dataclass(frozen=True, kw_only=True)
class ModelBinding:
    """A model bound to a role by the host."""

    client: ModelClient
    options: Sequence[str] = ("max_tokens", "temperature")
    """Options that calls under this role may set."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(self.options))


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """An app: everything that runs need, as plain data that can be copied into other processes."""

    driver: ExecutionDriver
    """What does the work: ``agent_driver(...)``, ``team_driver(...)`` or a driver of your own."""
    grants: Grants = field(default_factory=Grants)
    """Upper bound of what runs may call; nothing but the ``main`` model role by default."""
    budgets: Budgets = field(default_factory=Budgets)
    """Limits of each run with all its delegates; unlimited by default."""
    tools: Sequence[Tool] = ()
    """Tools that any driver of this app may dispatch, beside those that agents bring."""
    models: Mapping[str, ModelBinding | ModelClient] = field(default_factory=dict)
    """Models bound to roles. A binding for ``main`` replaces the agents' own models."""
    event_capacity: int = DEFAULT_CAPACITY
    """Events of a run kept in memory, at least 2."""
    estimate_input_tokens: EstimateInputTokens | None = None
    """Tokens of a request before it is sent; an estimate from its characters by default."""
    active_timeout: float | None = None
    """Seconds that a run may work; time that it waits for an answer does not count. Unlimited by default."""
    input_timeout: float | None = None
    """Seconds that a run waits for an answer, unless the question says otherwise. Unlimited by default."""
    completion_policy: CompletionPolicy | None = None
    """Judges every completed turn: accept it, send it back, or stop; accepted by default."""
    allow_revision_effects: bool = False
    """Tools and effects may run after a completion policy has sent the work back."""
    execution_policy: ExecutionPolicy | None = None
    """Allows, denies or asks about every tool call and effect, at the root of the run; allowed by default."""
    approvals: Approvals | None = None
    """Who must approve which calls. Without it, what asks for an approval is denied."""
    controller: StepController | None = None
    """Has a say before the run and before each task model call."""
    context_policy: ContextPolicy | None = None
    """Projects the conversation of each task model call; sent whole by default."""
    prices: PriceTable | None = None
    """What models cost; needed for limits in money."""
    tool_batches: ToolBatches = "first_n"
    """What runs of a batch of tool calls that is over the limit: the first that fit, or none of them
    (``all_or_nothing``)."""
    telemetry: Sequence[TelemetryObserver] = ()
    """Told of what happens, without any content, in the process where it happens."""
    hooks: SessionHooks = field(default_factory=SessionHooks)
    """Called when a session comes to life in a process, and when it leaves."""
    resource_idle_limit: float | None = None
    """Seconds after which an unused session resource no longer keeps its session in memory; never by
    default."""
    child_text: bool = False
    """Text and messages of delegates are events of the run under their names; by default they stay inside."""
    abilities: Sequence[Ability] = ()
    """Bound in this order for each run before its driver, and disposed in reverse after it."""
    limits: Limits = field(default_factory=Limits)
    """Upper bounds of what the app's own agents may say of themselves."""
    defaults: AgentDefaults = field(default_factory=AgentDefaults)
    """What the app's own agents have where they do not say."""
    project_root: str | None = None
    """Absolute path below which relative paths of agents are looked up, where their runs are. By default the
    working directory at construction, where an agent or its defaults may name paths."""
    name: str = ""
    """Name of the app in listings; the digest of the configuration when empty."""

    def __post_init__(self) -> None:
        check_driver(self.driver)
        check_capacity(self.event_capacity)
        check_kind("config.grants", self.grants, Grants)
        check_kind("config.budgets", self.budgets, Budgets)
        check_kind("config.models", self.models, Mapping)
        check_kind("config.name", self.name, str)
        check_kind("config.hooks", self.hooks, SessionHooks)
        check_kind("config.child_text", self.child_text, bool)
        check_kind("config.allow_revision_effects", self.allow_revision_effects, bool)
        if self.completion_policy is not None:
            check_kind("config.completion_policy", self.completion_policy, CompletionPolicy)
        for member, kind in (
            ("execution_policy", ExecutionPolicy),
            ("approvals", Approvals),
            ("controller", StepController),
            ("context_policy", ContextPolicy),
            ("prices", PriceTable),
        ):
            if getattr(self, member) is not None:
                check_kind(f"config.{member}", getattr(self, member), kind)
        if self.tool_batches not in get_args(ToolBatches):
            raise ValidationFailed(
                f"config.tool_batches must be 'first_n' or 'all_or_nothing', not {self.tool_batches!r:.80}",
                path="config.tool_batches",
            )
        if self.prices is None and _limits_money(self.budgets):
            raise ValidationFailed(
                "a limit in money needs config.prices, a PriceTable", path="config.budgets.max_cost"
            )
        object.__setattr__(self, "telemetry", check_observers("config.telemetry", self.telemetry))
        if self.resource_idle_limit is not None:
            check_kind("config.resource_idle_limit", self.resource_idle_limit, int | float)
            if not 0 < self.resource_idle_limit < math.inf:
                raise ValidationFailed(
                    f"config.resource_idle_limit must be a positive number of seconds, not "
                    f"{self.resource_idle_limit!r}",
                    path="config.resource_idle_limit",
                )
        if self.estimate_input_tokens is not None:
            check_kind("config.estimate_input_tokens", self.estimate_input_tokens, Callable)
        check_kind("config.limits", self.limits, Limits)
        check_kind("config.defaults", self.defaults, AgentDefaults)
        object.__setattr__(self, "tools", check_tools(self.tools, "config.tools"))
        object.__setattr__(self, "abilities", check_abilities(self.abilities, "config.abilities"))
        root = check_project_root(self.project_root)
        # Only where it matters: it is part of what makes two apps the same one.
        if root is None and getattr(self.driver, "reads_files", False):
            root = str(Path.cwd())
        object.__setattr__(self, "project_root", root)
        bindings = {role: _binding(role, model) for role, model in self.models.items()}
        object.__setattr__(self, "models", bindings)
        self.grants.narrowed(None)

    def check_clocks(self) -> None:
        """Raise :class:`InputError` unless the timeouts are positive (contract section 6: at ``start``)."""
        for name in ("active_timeout", "input_timeout"):
            check_seconds(f"config.{name}", getattr(self, name))

    @property
    def prepares_steps(self) -> bool:
        """Whether something has a say before a task model call."""
        return self.controller is not None or self.context_policy is not None

    def binding(self, role: str) -> ModelBinding | None:
        """The model bound to a role, if any."""
        found = self.models.get(role)
        assert found is None or isinstance(found, ModelBinding)  # __post_init__ made bindings of all
        return found


class ConfigMembers(TypedDict, total=False):
    """The members of :class:`RuntimeConfig` as keywords of :class:`retinue.Runtime`."""

    driver: ExecutionDriver
    grants: Grants
    budgets: Budgets
    tools: Sequence[Tool]
    models: Mapping[str, ModelBinding | ModelClient]
    event_capacity: int
    estimate_input_tokens: EstimateInputTokens | None
    active_timeout: float | None
    input_timeout: float | None
    completion_policy: CompletionPolicy | None
    allow_revision_effects: bool
    execution_policy: ExecutionPolicy | None
    approvals: Approvals | None
    controller: StepController | None
    context_policy: ContextPolicy | None
    prices: PriceTable | None
    tool_batches: ToolBatches
    telemetry: Sequence[TelemetryObserver]
    hooks: SessionHooks
    resource_idle_limit: float | None
    child_text: bool
    abilities: Sequence[Ability]
    limits: Limits
    defaults: AgentDefaults
    project_root: str | None
    name: str


def _limits_money(budgets: Budgets) -> bool:
    return budgets.max_cost is not None or any(role.max_cost is not None for role in budgets.roles.values())


def _binding(role: str, model: object) -> ModelBinding:
    if isinstance(model, ModelBinding):
        return model
    if not isinstance(model, ModelClient):
        path = f"config.models.{role}"
        raise ValidationFailed(f"{path} is {model!r:.80}, not a model", path=path)
    return ModelBinding(client=model)
