"""Grants narrow and never widen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue import Grants
from retinue.errors import InputError, ValidationFailed

names = st.lists(st.sampled_from("abcdef"), unique=True, max_size=6)


@given(host=names, wanted=names, roles=names)
def test_narrowing_gives_what_was_wanted_or_refuses(
    host: list[str], wanted: list[str], roles: list[str]
) -> None:
    grants = Grants(tool_ids=host, model_roles=roles)
    asked = Grants(tool_ids=wanted, model_roles=roles)
    if set(wanted) <= set(host):
        assert grants.narrowed(asked).tool_ids == tuple(wanted)
    else:
        with pytest.raises(InputError):
            grants.narrowed(asked)
    assert grants.tool_ids == tuple(host)


def test_required_tools_of_both_are_required() -> None:
    host = Grants(tool_ids=["a", "b", "c"], required_tool_ids=["a"])
    narrowed = host.narrowed(Grants(tool_ids=["b", "a"], required_tool_ids=["b"]))
    assert narrowed.required_tool_ids == ("a", "b")
    assert narrowed.model_roles == ("main",)
    with pytest.raises(InputError, match="required tool a"):
        host.narrowed(Grants(tool_ids=["b"]))
    with pytest.raises(InputError, match="required tool d"):
        host.narrowed(Grants(tool_ids=["a"], required_tool_ids=["d"]))
    assert host.narrowed(None) == host


def test_an_omitted_role_list_is_the_main_role_alone() -> None:
    with pytest.raises(InputError, match="model_roles asks for main"):
        Grants(model_roles=["judge"]).narrowed(Grants())


@pytest.mark.parametrize("field", ["tool_ids", "model_roles", "required_tool_ids"])
@pytest.mark.parametrize("value", ["text", ["a", "a"], ["a", ""], ["a", 5], 7, None])
def test_lists_of_distinct_names_are_asked_for(field: str, value: Any) -> None:
    with pytest.raises(ValidationFailed) as refused:
        Grants(**{field: value})
    assert refused.value.path == f"grants.{field}"


def test_what_was_given_is_copied() -> None:
    tools = ["a"]
    grants = Grants(tool_ids=tools)
    tools.append("b")
    assert grants.tool_ids == ("a",)
    assert Grants(tool_ids=(name for name in "ab")).tool_ids == ("a", "b")  # type: ignore[arg-type]
