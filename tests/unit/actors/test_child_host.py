"""The child host on the plain class, with a session host that is only a record of what it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from retinue.actors.child_host import ChildHostCore
from retinue.actors.messages import KeepAlive
from retinue.apps import AppSpec


class Method:
    """A remote method that never answers."""

    async def remote(self, *arguments: Any) -> None:
        await asyncio.Event().wait()


class SessionHost:
    watch = Method()
    child_messages = Method()


@pytest.fixture
async def core() -> AsyncIterator[ChildHostCore]:
    made = ChildHostCore("child-host", AppSpec(kind="name", digest="d", data=b"no:app", name="app"))
    yield made
    made.close()


async def test_a_session_host_that_was_given_up_is_told_so(core: ChildHostCore) -> None:
    root = SessionHost()
    assert await core.deliver("host-1", root, 1, [KeepAlive()])
    assert await core.deliver("host-1", root, 2, [KeepAlive()])
    core.give_up("host-1", "nothing was heard of it")
    assert not await core.deliver("host-1", root, 3, [KeepAlive()])  # its delegates were stopped here
    assert await core.deliver("host-1", root, 1, [KeepAlive()])  # a conversation that begins anew
    assert core.statistics().roots == 1
