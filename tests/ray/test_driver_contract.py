"""The conformance kit of the driver seam on a real local Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from retinue import ExecutionDriver
from retinue.testing import DriverRuleBroken, check_driver_contract
from tests.contract_drivers import DRIVERS
from tests.ray.conftest import MakeRuntime
from tests.ray.resource_drivers import Opener

TIMEOUT = 60


@pytest.mark.parametrize("make", DRIVERS.values(), ids=DRIVERS)
def test_our_drivers_keep_the_contract(
    make_runtime: MakeRuntime, make: Callable[[], ExecutionDriver]
) -> None:
    driver = make()
    checking = check_driver_contract(driver, runtime=make_runtime(driver=driver))
    report = asyncio.run(asyncio.wait_for(checking, TIMEOUT))
    assert report.result.status == "completed"
    assert report.event_count == report.result.final_cursor >= 3


def test_c291_the_primary_failure_wins_and_the_resource_is_disposed_of_once(
    make_runtime: MakeRuntime, tmp_path: object
) -> None:
    driver = Opener(f"{tmp_path}/log", scope="session", error="primary failure", closes=False)
    with pytest.raises(DriverRuleBroken, match="primary failure"):
        asyncio.run(
            asyncio.wait_for(check_driver_contract(driver, runtime=make_runtime(driver=driver)), TIMEOUT)
        )
    assert driver.lines() == ["open", "close"]
