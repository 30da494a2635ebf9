"""What controllers and context policies make of the next model call (contract section 9).

    what the run says ──> what the step says ──> checks, in order ──> the conversation projected

Runs on a user loop of the root's process, for the calls of delegates too.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retinue.config import ModelBinding, RuntimeConfig
from retinue.context_policies import ContextPolicy, Conversation, Projection, Provenance, grouping_of
from retinue.controllers import Step, StepOverrides
from retinue.errors import AccessDenied, BudgetExhausted, RetinueError, Unsupported
from retinue.grants import MAIN_ROLE, Grants
from retinue.grouping import check_projection, has_continuation, is_source
from retinue.messages import Message, decode_message, encode_message
from retinue.policy_context import PolicyContext
from retinue.protocol import ModelPrepared, PrepareModel


class StepPreparation:
    """The controller and the context policy of one run. Belongs to a user loop."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._run = StepOverrides()
        """What the controller said before the run."""

    async def prepare_run(self, ctx: PolicyContext) -> None:
        """Ask the controller before the run.

        Raises:
            BudgetExhausted: it says stop.
        """
        controller = self._config.controller
        if controller is not None:
            said = await _answer(lambda: controller.prepare_run(ctx))
            self._run = _checked_overrides(said, "prepare_run")
            _check_stop(self._run)

    async def prepare(self, message: PrepareModel, index: int, ctx: PolicyContext) -> ModelPrepared:
        """What becomes of a call.

        Args:
            message: what is asked for.
            index: 0 for the first task call of whoever asks.
            ctx: of whoever asks.

        Raises:
            BudgetExhausted: the controller says stop.
            AccessDenied: the role, or an active tool, is not granted.
            Unsupported: the role has no model, or an option is not allowed.
            RetinueError: a required tool is missing, another model cannot go on with this conversation, or
                the projection is no projection.
        """
        overrides = await self._overrides(message, index, ctx)
        role = overrides.model_role or message.role
        binding = _check_role(self._config, ctx.grants, role)
        tools = _active_tools(overrides, message.tools, ctx.grants)
        if ctx.participant == "":
            check_required(ctx.grants, tools)
        _check_options(overrides.options, role, binding)
        before = [decode_message(body) for body in message.messages]
        if role != message.role and any(has_continuation(item) for item in before):
            raise RetinueError(
                f"the model role cannot change from {message.role!r} to {role!r} here: the conversation "
                f"holds "
                "data of its provider that another model cannot go on from",
                code="execution_failed",
            )
        policy = overrides.context_policy or self._config.context_policy
        messages = None if policy is None else await _projected(policy, before, ctx)
        return ModelPrepared(role=role, tools=tools, options=dict(overrides.options), messages=messages)

    async def _overrides(self, message: PrepareModel, index: int, ctx: PolicyContext) -> StepOverrides:
        controller = self._config.controller
        if controller is None:
            return self._run
        step = Step(index=index, tools=tuple(message.tools))
        said = await _answer(lambda: controller.prepare_step(step, ctx))
        overrides = _merged(self._run, _checked_overrides(said, "prepare_step"))
        _check_stop(overrides)
        return overrides


def check_required(grants: Grants, offered: Sequence[str]) -> None:
    """Raise ``RetinueError`` unless every required tool is among those that a root's call offers."""
    missing = sorted(set(grants.required_tool_ids) - set(offered))
    if missing:
        raise RetinueError(
            f"required tool {', '.join(missing)} is not offered to the model; give it to the agent or to "
            "config.tools, or require it no longer (grants.required_tool_ids)",
            code="execution_failed",
        )


async def _answer(ask: Callable[[], object]) -> object:
    answer = ask()
    return await answer if inspect.isawaitable(answer) else answer


def _checked_overrides(said: object, what: str) -> StepOverrides:
    """What a controller gave, with members of the right kind."""
    if said is None:
        return StepOverrides()
    if not isinstance(said, StepOverrides):
        raise _misspoken(what, f"{type(said).__name__}, not StepOverrides")
    for name, is_right in _MEMBERS.items():
        value: object = getattr(said, name)
        if value is not None and not is_right(value):
            raise _misspoken(what, f"{name}={value!r:.80}, which cannot be")
    return said


def _misspoken(what: str, problem: str) -> RetinueError:
    return RetinueError(f"the controller's {what} gave {problem}", code="execution_failed")


def _are_texts(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(item, str) for item in value)


_MEMBERS: dict[str, Callable[[object], bool]] = {
    "active_tool_ids": _are_texts,
    "model_role": lambda value: isinstance(value, str),
    "options": lambda value: isinstance(value, Mapping),
    "context_policy": lambda value: isinstance(value, ContextPolicy),
    "stop": lambda value: isinstance(value, str),
}
"""What each member of :class:`StepOverrides` must be, where it says something."""


def _merged(run: StepOverrides, step: StepOverrides) -> StepOverrides:
    """What the step says in place of what the run says, key by key."""
    said = {
        each.name: value
        for each in dataclasses.fields(StepOverrides)
        if each.name != "options" and (value := getattr(step, each.name)) is not None
    }
    return dataclasses.replace(run, options={**run.options, **step.options}, **said)


def _check_stop(overrides: StepOverrides) -> None:
    if overrides.stop is not None:
        raise BudgetExhausted(overrides.stop or "the controller says stop", scope="controller")


def _check_role(config: RuntimeConfig, grants: Grants, role: str) -> ModelBinding | None:
    if role not in grants.model_roles:
        raise AccessDenied(f"model role {role!r} is not granted to this run", role=role)
    binding = config.binding(role)
    if binding is None and role != MAIN_ROLE:
        raise Unsupported(
            f"model role {role!r} has no model bound to it; give RuntimeConfig(models={{{role!r}: ...}})",
            operation=f"model_role:{role}",
        )
    return binding


def _active_tools(overrides: StepOverrides, offered: Sequence[str], grants: Grants) -> list[str]:
    """Names of the tools that the model may be offered."""
    active = overrides.active_tool_ids
    if active is None:
        return [name for name in offered if name in grants.tool_ids]
    for name in active:
        if name not in grants.tool_ids:
            raise AccessDenied(
                f"the controller activates {name!r}, which is not granted to this run", tool=name
            )
        if name not in offered:
            raise RetinueError(
                f"the controller activates {name!r}, which the driver does not offer", code="execution_failed"
            )
    if len(set(active)) != len(active):
        raise RetinueError(
            f"the controller activates a tool twice: {', '.join(active)}", code="execution_failed"
        )
    return list(active)


def _check_options(options: Mapping[str, Any], role: str, binding: ModelBinding | None) -> None:
    allowed: Sequence[str] = () if binding is None else binding.options
    for name in options:
        if name not in allowed:
            raise Unsupported(
                f"model role {role!r} does not allow the option {name}; bind a model to it with "
                "ModelBinding(client=..., options=[...])",
                operation=str(name),
            )


async def _projected(
    policy: ContextPolicy, before: Sequence[Message], ctx: PolicyContext
) -> list[bytes] | None:
    """The conversation as a policy projects it; ``None`` where that is what it was."""
    grouping = grouping_of(policy)
    shown = Conversation(
        history=copy.deepcopy(list(before)),
        entries=copy.deepcopy([message for message in before if is_source(message)]),
    )
    projection = await _answer(lambda: policy.project(shown, ctx))
    who = f"context policy {getattr(policy, 'id', type(policy).__name__)!r}"
    if not isinstance(projection, Projection):
        raise RetinueError(
            f"{who} gave {type(projection).__name__}, not a Projection", code="execution_failed"
        )
    provenance: object = projection.provenance
    if not isinstance(provenance, Sequence) or not all(isinstance(each, Provenance) for each in provenance):
        raise RetinueError(
            f"{who} gave no list of Provenance; say what became of each source (provenance)",
            code="execution_failed",
        )
    messages = list(projection.messages)
    bodies = [encode_message(message) for message in messages]
    check_projection(before, messages, grouping)
    return None if messages == list(before) else bodies
