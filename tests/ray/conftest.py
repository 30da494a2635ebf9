"""One local Ray for the whole test session; runtimes with durable stores on it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from retinue import Identity, Runtime, connect
from retinue.actors import deployment
from retinue.actors.names import CHILD_HOST_PREFIX, DIRECTORY, HOST_PREFIX, NAMESPACE, REGISTRY, STORE_PREFIX

MAX_RESIDENT = 8
"""Small, so that the sessions of earlier tests make room."""

MakeRuntime = Callable[..., Runtime]


@pytest.fixture(scope="package")
def cluster() -> Iterator[str]:
    """An ephemeral Ray with the runtime's actors, for the tests of this folder; its address."""
    connection = connect()
    options = deployment.default_options(ephemeral=True, max_resident=MAX_RESIDENT)
    deployment.attach(ephemeral=connection.mode == "ephemeral", options=options)
    yield connection.address
    deployment.withdraw()
    connection.close()


@pytest.fixture
def identity() -> Identity:
    return Identity(tenant_id="acme", user_id=f"user-{uuid.uuid4().hex[:8]}")


@pytest.fixture(scope="package")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all, as on a real cluster; every test has a user of its own in it."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/retinue.db"


@pytest.fixture
def make_runtime(cluster: str, store_url: str) -> MakeRuntime:
    """Makes runtimes on the session's Ray, by default with a store of this test."""

    def make(*args: Any, **options: Any) -> Runtime:
        options.setdefault("store", store_url)
        return Runtime(*args, **options)

    return make


def named_actors(prefix: str) -> list[Any]:
    """Handles of the live actors whose names begin so."""
    handles = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix):
            try:
                handles.append(ray.get_actor(entry["name"], NAMESPACE))
            except ValueError:
                continue
    return handles


def session_hosts() -> list[Any]:
    return named_actors(HOST_PREFIX)


def child_hosts() -> list[Any]:
    return named_actors(CHILD_HOST_PREFIX)


def store_actors() -> list[Any]:
    return named_actors(STORE_PREFIX)


def directory() -> Any:
    """The directory: on an ephemeral Ray it shares the registry's process."""
    found = named_actors(DIRECTORY) or named_actors(REGISTRY)
    return found[0]


def directory_statistics() -> dict[str, Any]:
    return dict(json.loads(ray.get(directory().statistics.remote())))
