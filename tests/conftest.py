"""Fixtures that tests of every floor share: who runs, in which session, on which runtime."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from retinue import Identity, Runtime


class MakeLocalRuntime(Protocol):
    """Makes in-process runtimes; takes what :class:`retinue.Runtime` takes."""

    def __call__(self, *args: Any, **options: Any) -> Runtime: ...


@pytest.fixture
def identity() -> Identity:
    """A user of the tenant ``acme`` that no other test has."""
    return Identity(tenant_id="acme", user_id=f"user-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def session_id() -> str:
    """A session id that no other test has."""
    return f"session-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def local_runtime() -> Iterator[MakeLocalRuntime]:
    """Makes runtimes of the in-process backend, and closes them after the test."""
    runtimes: list[Runtime] = []

    def make(*args: Any, **options: Any) -> Runtime:
        runtimes.append(Runtime(*args, backend="inprocess", **options))
        return runtimes[-1]

    yield make
    for runtime in reversed(runtimes):
        runtime.close()
