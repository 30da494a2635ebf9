"""Apps: what makes two of them the same."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from retinue import RuntimeConfig
from retinue.apps import AppSpec, Isolation, app_by_name, app_by_value
from retinue.errors import ValidationFailed
from tests.conftest import MakeLocalRuntime
from tests.support import trivial


def by_value(isolation: Isolation) -> AppSpec:
    return app_by_value(RuntimeConfig(driver=trivial), isolation)


def by_name(isolation: Isolation) -> AppSpec:
    return app_by_name("module:factory", isolation)


@pytest.mark.parametrize("make", [by_value, by_name])
def test_isolation_is_part_of_what_an_app_is(make: Callable[[Isolation], AppSpec]) -> None:
    dedicated, shared = make("dedicated"), make("shared")
    assert dedicated.data == shared.data
    assert dedicated.digest != shared.digest
    assert make("shared") == shared
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shared), type=AppSpec) == shared
    assert app_by_value(RuntimeConfig(driver=trivial)).isolation == "dedicated"


@pytest.mark.parametrize("isolation", ["process", "", None, 3, ["shared"]])
def test_another_isolation_is_refused_where_it_is_given(
    local_runtime: MakeLocalRuntime, isolation: object
) -> None:
    with pytest.raises(ValidationFailed, match=r"'dedicated'.*'shared'") as refused:
        local_runtime(driver=trivial, isolation=isolation)
    assert refused.value.path == "isolation"
