"""The configuration of a runtime: what runs, what it may use, what it may spend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from retinue.budgets import Budgets
from retinue.drivers import ExecutionDriver, check_driver
from retinue.errors import ValidationFailed
from retinue.event_log import DEFAULT_CAPACITY, check_capacity
from retinue.grants import Grants
from retinue.models import ModelClient, ModelRequest
from retinue.tools import Tool, check_kind, check_tools

EstimateInputTokens = Callable[[ModelRequest, ModelClient], int]


@dataclass(frozen=True, kw_only=True)
class ModelBinding:
    """A model bound to a role by the host."""

    client: ModelClient
    options: Sequence[str] = ("max_tokens", "temperature")
    """Options that calls under this role may set."""


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
    name: str = ""
    """Name of the app in listings; the digest of the configuration when empty."""

    def __post_init__(self) -> None:
        check_driver(self.driver)
        check_capacity(self.event_capacity)
        check_kind("config.grants", self.grants, Grants)
        check_kind("config.budgets", self.budgets, Budgets)
        check_kind("config.models", self.models, Mapping)
        check_kind("config.name", self.name, str)
        if self.estimate_input_tokens is not None:
            check_kind("config.estimate_input_tokens", self.estimate_input_tokens, Callable)
        object.__setattr__(self, "tools", check_tools(self.tools, "config.tools"))
        bindings = {role: _binding(role, model) for role, model in self.models.items()}
        object.__setattr__(self, "models", bindings)
        self.grants.narrowed(None)

    def binding(self, role: str) -> ModelBinding | None:
        """The model bound to a role, if any."""
        found = self.models.get(role)
        assert found is None or isinstance(found, ModelBinding)  # __post_init__ made bindings of all
        return found


def _binding(role: str, model: object) -> ModelBinding:
    if isinstance(model, ModelBinding):
        return model
    if not isinstance(model, ModelClient):
        path = f"config.models.{role}"
        raise ValidationFailed(f"{path} is {model!r:.80}, not a model", path=path)
    return ModelBinding(client=model)
