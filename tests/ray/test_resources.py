"""Resources and artifacts where the session lives in another process."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from retinue import Identity, Runtime
from retinue.errors import SessionConflict
from tests.ray.conftest import MakeRuntime
from tests.ray.resource_drivers import Opener

TIMEOUT = 60


def close(runtime: Runtime, identity: Identity, session_id: str) -> list[str]:
    return runtime.resources.close_session_blocking(identity, session_id)


def run(runtime: Runtime, identity: Identity, input: str = "go") -> str:
    result = runtime.start(input, identity=identity, session_id="s").wait(TIMEOUT)
    assert result.status == "completed", result.reason
    return result.text


def test_c21_c24_c32_a_session_resource_lives_in_the_sessions_process_until_it_is_closed(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    driver = Opener(f"{tmp_path}/log")
    runtime = make_runtime(driver=driver)
    first = run(runtime, identity)
    assert run(runtime, identity) == first
    assert int(first.split("-")[0]) != os.getpid()
    other = Identity(tenant_id="other", user_id=identity.user_id)
    assert run(runtime, other) != first
    assert driver.lines() == ["open", "open"]

    waiting = runtime.start("wait", identity=identity, session_id="s")
    deadline = time.monotonic() + TIMEOUT
    while "waiting" not in driver.lines():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(SessionConflict) as refused:
        close(runtime, identity, "s")
    assert refused.value.code == "session_conflict"
    assert "close" not in driver.lines()
    Path(f"{driver.log}.go").touch()
    assert waiting.wait(TIMEOUT).text == first

    # From another client of the same store too.
    assert close(make_runtime(driver=driver), identity, "s") == []
    assert driver.lines() == ["open", "open", "waiting", "close"]
    assert close(runtime, identity, "s") == []
    assert close(runtime, identity, "never-used") == []
    found = asyncio.run(runtime.get_artifact(identity, "s", waiting.run_id))
    assert found is not None
    assert found.data.decode() == first
    assert asyncio.run(runtime.get_artifact(other, "s", waiting.run_id)) is None
    assert run(runtime, identity) != first


def test_what_cannot_be_closed_is_named(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    driver = Opener(f"{tmp_path}/log", closes=False)
    runtime = make_runtime(driver=driver)
    run(runtime, identity)
    assert close(runtime, identity, "s") == ["x"]
    assert driver.lines() == ["open", "close"]


def test_a_delegate_in_a_child_host_has_run_resources_only(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    driver = Opener(f"{tmp_path}/run", scope="run")
    value = run(make_runtime(driver=driver), identity, "delegate")
    assert int(value.split("-")[0]) != os.getpid()
    assert driver.lines() == ["open", "close"]

    shared = Opener(f"{tmp_path}/session")
    refused = make_runtime(driver=shared).start("delegate", identity=identity, session_id="t").wait(TIMEOUT)
    assert refused.reason is not None
    assert refused.reason.code == "unsupported"
    assert shared.lines() == []
