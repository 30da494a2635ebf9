"""Policies where sessions are actors: the root's instance is asked, also for delegates in other processes."""

from __future__ import annotations

from retinue import Budgets, Grants, Identity
from tests.ray.conftest import MakeRuntime
from tests.ray.policy_parts import Counting, Delegates

TIMEOUT = 60


def test_policies_of_a_tree_are_one_instance_at_its_root(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    policy = Counting(most=2)
    runtime = make_runtime(
        driver=Delegates(count=2),
        grants=Grants(tool_ids=["look"]),
        execution_policy=policy,
        controller=policy,
        context_policy=policy,
    )
    handle = runtime.start("go", identity=identity, session_id="s")
    result = handle.wait(TIMEOUT)
    assert result.status == "completed", result.reason
    root_pid = result.text
    texts, complete = result.structured
    parts = [text.split(" | ") for text in texts]
    assert [said for said, _, _ in parts] == [f"seen by {root_pid}"] * 3
    assert len({pid for _, _, pid in parts}) > 1  # delegates ran elsewhere
    assert parts[1][1] == f"saw x in {parts[1][2]}"
    assert parts[2][1] == f"[denied] policy: 3 of 2 in {root_pid} for child-1"
    assert complete is False  # the root was still at work

    report = handle.usage_report_blocking()
    assert report is not None
    assert report.complete
    assert [each.name for each in report.participants] == ["", "child-0", "child-1"]
    assert [each.own.usage.total_tokens for each in report.participants] == [5, 5, 5]
    assert report.tree.usage.total_tokens == 15
    assert report.tools == {"look": 3}
    later = make_runtime(driver=Delegates(count=0)).attach(handle.run_id, identity=identity)
    assert later.usage_report_blocking() == report


def test_a_controller_stops_the_tree_from_its_root(make_runtime: MakeRuntime, identity: Identity) -> None:
    policy = Counting(most=100)
    runtime = make_runtime(driver=Delegates(count=8), grants=Grants(tool_ids=["look"]), controller=policy)
    result = runtime.run_blocking("go", identity=identity, session_id="s")
    assert (result.status, result.reason and result.reason.message) == ("stopped", "enough steps")
    assert result.budget is not None
    assert (result.budget.model_calls.used, result.budget.model_calls.reserved) == (6, 0)


def test_a_run_that_ran_out_goes_on_after_its_host_has_forgotten_it(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    runtime = make_runtime(
        driver=Delegates(count=1),
        grants=Grants(tool_ids=["look"]),
        budgets=Budgets(max_model_calls=1),
    )
    run = runtime.start("go", identity=identity, session_id="s")
    stopped = run.wait(TIMEOUT)
    assert (stopped.status, stopped.reason and stopped.reason.code) == ("stopped", "budget_exhausted")
    elsewhere = make_runtime(
        driver=Delegates(count=1), grants=Grants(tool_ids=["look"]), budgets=Budgets(max_model_calls=1)
    )
    again = elsewhere.resume_blocking(run.run_id, top_up=Budgets(max_model_calls=3), identity=identity)
    result = again.wait(TIMEOUT)
    assert result.status == "completed", result.reason
    assert result.budget is not None
    assert (result.budget.model_calls.limit, result.budget.model_calls.used) == (4, 3)
