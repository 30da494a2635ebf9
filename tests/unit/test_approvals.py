"""Who must approve what, and what a request shows of the call."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from retinue import Approval, ApprovalRequest, Approvals
from retinue.approval_records import (
    MAX_REASON,
    SHOWN_BYTES,
    approval_of,
    check_decision,
    check_same,
    new_request,
    record_of,
    run_of,
    shown_arguments,
)
from retinue.drivers import RunRequest
from retinue.errors import DamagedRecord, InputError, NotFound, ValidationFailed
from retinue.grants import Grants
from retinue.ids import Identity
from retinue.protocol import DecideRequest

ROOT = RunRequest(
    input="x",
    identity=Identity(tenant_id="acme", user_id="ann"),
    session_id="s",
    run_id="run:1",
    attempt_id="a",
    root_run_id="label of the caller",
    grants=Grants(),
)


def request(arguments: bytes = b'{"amount":3}', **changes: Any) -> ApprovalRequest:
    options: dict[str, Any] = {
        "run_id": "child",
        "agent_name": "helper",
        "tool_name": "pay",
        "reason": "it costs money",
        "timeout": 60.0,
        "wall_clock": lambda: 1000.0,
    }
    return new_request(ROOT, arguments=arguments, **{**options, **changes})


@pytest.mark.parametrize(
    ("members", "path"),
    [
        ({"require": "some"}, "require"),
        ({"require": 3}, "require"),
        ({"require": ["pay", ""]}, "require"),
        ({"require": ["pay", 3]}, "require"),
        ({"on_request": "ask me"}, "on_request"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": 10**400}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": "60"}, "timeout"),
        ({"timeout_action": "throw"}, "timeout_action"),
    ],
)
def test_a_member_that_is_wrong_is_refused_by_its_path(members: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationFailed) as refused:
        Approvals(**members)
    assert refused.value.path == f"config.approvals.{path}"


@pytest.mark.parametrize(
    ("require", "pay", "read"),
    [("none", False, False), ("all", True, True), (["pay"], True, False), (("read", "pay"), True, True)],
)
def test_which_tools_need_an_approval(require: Any, pay: bool, read: bool) -> None:
    approvals = Approvals(require=require)
    assert (approvals.requires("pay"), approvals.requires("read")) == (pay, read)


def test_a_list_that_changes_later_changes_nothing() -> None:
    names = ["pay"]
    approvals = Approvals(require=names)
    names.append("read")
    assert not approvals.requires("read")


def test_a_request_names_whose_it_is_and_of_which_run() -> None:
    made = request()
    assert made.id.startswith("run:1:")
    assert run_of(made.id) == "run:1"
    assert (made.tenant_id, made.user_id, made.session_id) == ("acme", "ann", "s")
    assert (made.root_run_id, made.run_id, made.agent_name) == ("run:1", "child", "helper")
    assert (made.requested_at, made.expires_at) == (1000.0, 1060.0)
    assert (made.tool_name, made.arguments, made.reason) == ("pay", {"amount": 3}, "it costs money")


def test_two_requests_for_the_same_call_are_two() -> None:
    assert request().id != request().id


def test_the_digest_is_of_the_arguments_and_not_of_how_they_are_written() -> None:
    same = request(b'{ "b": [1, 2],  "a": "\\u00e4" }').digest
    assert same == request('{"a":"ä","b":[1,2]}'.encode()).digest
    assert same != request('{"a":"ä","b":[2,1]}'.encode()).digest


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "ä" * SHOWN_BYTES},
        {"rows": [{"name": "x" * 50, "value": number} for number in range(5_000)]},
        {f"key {number}": number for number in range(5_000)},
        {"a": {"b": {"c": ["y" * 10_000] * 100}}},
        {"k" * 20_000: 1},
    ],
)
def test_arguments_that_are_too_long_for_an_event_are_cut_and_their_digest_is_of_all(
    arguments: dict[str, Any],
) -> None:
    made = request(json.dumps(arguments).encode())
    assert len(msgspec.json.encode(made.arguments)) <= SHOWN_BYTES
    assert made.arguments != arguments
    assert "…" in json.dumps(made.arguments, ensure_ascii=False)
    first = next(iter(arguments.values()))
    changed = {**arguments, "end": first}
    assert request(json.dumps(changed).encode()).digest != made.digest


def test_what_fits_is_shown_whole_and_a_short_member_stays_whole_beside_a_long_one() -> None:
    fits = {"text": "x" * (SHOWN_BYTES - 20)}
    assert shown_arguments(fits) == fits
    assert shown_arguments({"to": "bob", "text": "x" * 100_000})["to"] == "bob"


def test_a_record_gives_back_its_request() -> None:
    made = request()
    record = record_of(made)
    assert (record.run_id, record.tool_name, record.digest) == ("run:1", "pay", made.digest)
    view = approval_of(msgspec.structs.replace(record, state="denied", by="bob", reason="no", decided_at=7.0))
    assert view == Approval(request=made, state="denied", by="bob", reason="no", decided_at=7.0)
    assert (view.id, view.pending, approval_of(record).pending) == (made.id, False, True)


def test_a_record_that_cannot_be_read_is_named() -> None:
    record = msgspec.structs.replace(record_of(request()), request=b'{"id":')
    with pytest.raises(DamagedRecord) as damaged:
        approval_of(record)
    assert record.approval_id in damaged.value.place


@pytest.mark.parametrize("approval_id", ["", "nonsense", ":1"])
def test_an_id_without_a_run_is_unknown(approval_id: str) -> None:
    with pytest.raises(NotFound):
        run_of(approval_id)


def test_a_decision_agrees_with_what_stands_or_is_told_what_does() -> None:
    record = record_of(request())
    decision = DecideRequest(run_id="run:1", approval_id=record.approval_id, approve=True, by="eve")
    approved = msgspec.structs.replace(record, state="approved", by="bob")
    check_same(approved, decision)
    for state in ("denied", "expired", "cancelled"):
        with pytest.raises(InputError) as refused:
            check_same(msgspec.structs.replace(approved, state=state), decision)
        assert (refused.value.code, refused.value.state, refused.value.by) == (
            "input_already_resolved",
            state,
            "bob",
        )


@pytest.mark.parametrize(
    ("by", "reason", "field"),
    [
        ("", "", "by"),
        ("\ud800", "", "by"),
        ("b" * (MAX_REASON + 1), "", "by"),
        ("bob", "\ud800", "reason"),
        ("bob", "r" * (MAX_REASON + 1), "reason"),
        ("bob", 3, "reason"),
    ],
)
def test_a_decision_that_cannot_be_kept_is_refused(by: str, reason: Any, field: str) -> None:
    with pytest.raises(InputError) as refused:
        check_decision("run:1:x", by, reason)
    assert refused.value.field == field
