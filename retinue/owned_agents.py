"""Agents that a run makes for itself, and closes when its work has settled (contract section 5)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeAlias

from retinue.agents import Agent
from retinue.errors import RetinueError, ValidationFailed
from retinue.resources import Resource

if TYPE_CHECKING:
    from retinue.services import ExecutionServices

AgentFactory: TypeAlias = Callable[..., Agent | Awaitable[Agent] | AbstractAsyncContextManager[Agent]]
"""Takes nothing, or the parameter ``services``; plain, a coroutine function, or one that gives an async
context manager, which is left at the end of the run."""


def check_factory(factory: object, path: str) -> bool:
    """Whether a factory takes ``services``; ``ValidationFailed`` when it cannot be called without more."""
    if not callable(factory):
        raise ValidationFailed(
            f"{path} is {factory!r:.80}; give an Agent, or a function that returns one", path=path
        )
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some builtins do not tell
        return False
    for parameter in parameters:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name != "services" and parameter.default is parameter.empty and not variadic:
            raise ValidationFailed(
                f"{path} needs the parameter {parameter.name!r}; it may take 'services' and nothing else",
                path=path,
            )
    return any(parameter.name == "services" for parameter in parameters)


async def make_agent(factory: AgentFactory, services: ExecutionServices, path: str) -> Resource[Agent]:
    """The agent of a run, and how it ends.

    Raises:
        ValidationFailed: the factory gave something else; what it holds was let go of then.
        Exception: whatever the factory raised.
    """
    made = factory(services=services) if check_factory(factory, path) else factory()
    if inspect.isawaitable(made):
        made = await made
    held: _Held | None = None
    agent: object = made
    if isinstance(made, AbstractAsyncContextManager):
        held = _Held(made)
        agent = await held.enter()
    if isinstance(agent, Agent):
        ending = _Ending(agent, held)
        return Resource(value=agent, ownership="runtime", dispose=ending.close)
    if held is not None:
        with contextlib.suppress(Exception):  # the agent that is none is what to tell of
            await held.leave()
    raise ValidationFailed(f"{path} gave {type(agent).__name__}, not an Agent", path=path)


class _Ending:
    """How an owned agent is closed: its own callback, then what holds it."""

    def __init__(self, agent: Agent, held: _Held | None) -> None:
        self._agent = agent
        self._held = held

    async def close(self) -> None:
        try:
            if self._agent.on_close is not None:
                closing = self._agent.on_close()
                if inspect.isawaitable(closing):
                    await closing
        finally:
            if self._held is not None:
                await self._held.leave()


class _Held:
    """A context manager in a task of its own: task groups and cancel scopes are left where they were entered,
    and a run begins and ends in two tasks."""

    def __init__(self, manager: AbstractAsyncContextManager[Agent]) -> None:
        self._manager = manager
        self._entered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._leaving = asyncio.Event()
        self._task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            async with self._manager as value:
                self._entered.set_result(value)
                await self._leaving.wait()
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio would let these out of the loop that all runs share.
            raise RetinueError(
                f"the agent's context manager raised {type(error).__name__}: {error}", code="execution_failed"
            ) from None

    async def enter(self) -> object:
        try:
            await asyncio.wait((self._entered, self._task), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            while not self._task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()
            raise
        if not self._entered.done():
            await self._task  # raises what kept it from being entered
            raise RetinueError("the agent's context manager gave nothing", code="execution_failed")
        return self._entered.result()

    async def leave(self) -> None:
        self._leaving.set()
        await self._task
