"""What controllers and context policies make of the next model call (contract section 9).

    what the run says ──> what the step says ──> checks, in order ──> the conversation projected

Runs on a user loop of the root's process, for the calls of delegates too.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from retinue.config import ModelBinding, RuntimeConfig
from retinue.context_policies import ContextPolicy, Conversation, Projection, Provenance, grouping_of
from retinue.controllers import Step, StepOverrides
from retinue.errors import AccessDenied, BudgetExhausted, InputError, RetinueError, Unsupported
from retinue.grants import MAIN_ROLE, Grants
from retinue.grouping import check_projection, has_continuation, is_labelled
from retinue.ids import SAFE_INTEGER
from retinue.json_values import encode_json
from retinue.messages import Message, decode_message, encode_message
from retinue.policy_context import PolicyContext, controller_call
from retinue.protocol import ModelPrepared, PrepareModel


class StepPreparation:
    """The controller and the context policy of one run. Belongs to a user loop."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._run = StepOverrides()
        """What the controller said before the run."""
        self._roles: dict[tuple[str, str], str] = {}
        """The role that the last call had, by the run id of who asked and the role that was asked for."""

    async def prepare_run(self, ctx: PolicyContext) -> None:
        """Ask the controller before the run.

        Raises:
            BudgetExhausted: it says stop.
        """
        controller = self._config.controller
        if controller is not None:
            with controller_call(ctx, "prepare_run") as told:
                said = await _answer(lambda: controller.prepare_run(ctx))
                self._run = _checked_overrides(said, "prepare_run")
                told.add(**_decided(self._run))
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
            Unsupported: the role has no model, or an option is not allowed or cannot be.
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
        self._check_change(message.role, role, before, ctx)
        policy = overrides.context_policy or self._config.context_policy
        messages = None
        if policy is not None:
            model_id = message.model_id if binding is None else binding.client.model_id
            messages = await _projected(policy, before, role, model_id, ctx)
        return ModelPrepared(role=role, tools=tools, options=dict(overrides.options), messages=messages)

    def _check_change(self, asked: str, role: str, before: Sequence[Message], ctx: PolicyContext) -> None:
        """Raise where a conversation with a provider's own data would go on under another role.

        The role before is that of the last call for which the same role was asked: a controller that goes on
        with what it chose changes nothing, and one that goes back to the driver's role does.
        """
        last = self._roles.get((ctx.run_id, asked), asked)
        if role != last and any(has_continuation(item) for item in before):
            raise RetinueError(
                f"the model role cannot change from {last!r} to {role!r} here: the conversation holds data "
                "of its provider that another model cannot go on from",
                code="execution_failed",
            )
        self._roles[ctx.run_id, asked] = role

    async def _overrides(self, message: PrepareModel, index: int, ctx: PolicyContext) -> StepOverrides:
        controller = self._config.controller
        if controller is None:
            return self._run
        step = Step(index=index, tools=tuple(message.tools))
        with controller_call(ctx, "prepare_step") as told:
            said = _checked_overrides(
                await _answer(lambda: controller.prepare_step(step, ctx)), "prepare_step"
            )
            told.add(**_decided(said))
        overrides = _merged(self._run, said)
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


def _decided(said: StepOverrides) -> dict[str, Any]:
    """What a controller said, as observers are told of it: nothing of what it explains."""
    return {
        "decision": "continue" if said.stop is None else "stop",
        "model_role": said.model_role,
        "active_tools": None if said.active_tool_ids is None else len(said.active_tool_ids),
    }


def _misspoken(what: str, problem: str) -> RetinueError:
    return RetinueError(f"the controller's {what} gave {problem}", code="execution_failed")


def _are_texts(value: object) -> bool:
    return _is_list(value) and all(isinstance(item, str) for item in value)


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
        active = [name for name in offered if name in grants.tool_ids]
    for name in active:
        if name not in grants.tool_ids:
            raise AccessDenied(
                f"the controller activates {name!r}, which is not granted to this run", tool=name
            )
    if len(set(active)) != len(active):
        raise RetinueError(f"a tool is offered twice: {', '.join(active)}", code="execution_failed")
    for name in active:
        if name not in offered:
            raise RetinueError(
                f"the controller activates {name!r}, which the driver does not offer", code="execution_failed"
            )
    return list(active)


def _check_options(options: Mapping[str, Any], role: str, binding: ModelBinding | None) -> None:
    """Every option is on the list of the role's binding, and has a value that can be sent."""
    allowed: Sequence[str] = () if binding is None else binding.options
    for name, value in options.items():
        if name not in allowed:
            raise Unsupported(
                f"model role {role!r} does not allow the option {name}; bind a model to it with "
                "ModelBinding(client=..., options=[...])",
                operation=str(name),
            )
        if problem := _option_problem(name, value):
            raise Unsupported(f"the option {name} {problem}, not {value!r:.80}", operation=name)


def _option_problem(name: str, value: object) -> str | None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if value is None:
        return None
    if name == "max_tokens" and not (isinstance(number, int) and 0 < number <= SAFE_INTEGER):
        return "must be a positive integer"
    if name == "temperature" and (number is None or not math.isfinite(number) or number < 0):
        return "must be a finite number of at least 0"
    try:
        encode_json(value)
    except (TypeError, ValueError, RecursionError):
        return "must be a JSON value"
    return None


async def _projected(
    policy: ContextPolicy, before: Sequence[Message], role: str, model_id: str, ctx: PolicyContext
) -> list[bytes] | None:
    """The conversation as a policy projects it; ``None`` where that is what it was."""
    grouping = grouping_of(policy)
    history = copy.deepcopy(list(before))
    shown = Conversation(
        history=history,
        entries=copy.deepcopy([message for message in before if is_labelled(message)]),
        role=role,
        model_id=model_id,
    )
    projection = await _answer(lambda: policy.project(shown, ctx))
    bodies = _checked_projection(projection, f"context policy {getattr(policy, 'id', None)!r}")
    after = [decode_message(body) for body in bodies]
    check_projection(before, after, grouping)
    return None if after == list(before) else bodies


def _checked_projection(projection: object, who: str) -> list[bytes]:
    """The messages of what a context policy gave, encoded; its members are of the right kind."""
    if not isinstance(projection, Projection):
        raise RetinueError(
            f"{who} gave {type(projection).__name__}, not a Projection", code="execution_failed"
        )
    provenance: object = projection.provenance
    if not _is_list(provenance) or not all(_is_provenance(each) for each in provenance):
        raise RetinueError(
            f"{who} gave no list of Provenance; say what became of each source (provenance)",
            code="execution_failed",
        )
    messages: object = projection.messages
    if not _is_list(messages):
        raise RetinueError(f"{who} gave no list of messages", code="execution_failed")
    try:
        return [encode_message(message) for message in messages]
    except InputError as error:
        raise RetinueError(f"{who}: {error.message}", code="execution_failed") from None


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_provenance(value: object) -> bool:
    if not isinstance(value, Provenance):
        return False
    name: object = value.source_id
    included: object = value.included
    reason: object = value.reason
    return (
        isinstance(name, str)
        and bool(name)
        and isinstance(included, bool)
        and (reason is None or isinstance(reason, str))
    )
