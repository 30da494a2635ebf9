"""Logs for machines: whose work a record is about, and nothing that is nobody's business."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from retinue import DriverOutput, ExecutionServices, Grants, Identity, RunRequest, ToolCall, logs, tool
from retinue.controllers import Step, StepOverrides
from retinue.current_work import Work, current_trace, current_work, trace_ids, working
from retinue.errors import ModelFailed, ValidationFailed
from retinue.logs import LogOptions, configure, configure_process, from_environment, without_secrets
from retinue.policy_context import PolicyContext
from tests.conftest import MakeLocalRuntime
from tests.support import FunctionDriver, driver, soon

app = logging.getLogger("app")
TRACE = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Configures JSON logs, and gives what was written so far."""
    monkeypatch.delenv(logs.LOG_VARIABLE, raising=False)
    root, stream = logging.getLogger(), io.StringIO()
    level = root.level
    monkeypatch.setattr(logs, "_options", None)
    configure(json=True, stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    for handler in list(root.handlers):
        if isinstance(handler, logs._Handler):
            root.removeHandler(handler)
    root.setLevel(level)


def test_a_record_is_one_object_a_line(lines: Any) -> None:
    app.info("two\nlines and an \N{SNOWMAN} and a \ud800, %s", "said")
    app.debug("not written")

    (line,) = lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "INFO",
        "logger": "app",
        "message": "two\nlines and an \N{SNOWMAN} and a \\ud800, said",
    }


def test_a_record_has_the_ids_of_the_work_and_the_trace(lines: Any) -> None:
    work = Work(tenant_id="acme", user_id="u", session_id="s", run_id="r")
    with working(work, TRACE):
        assert current_work() == work
        assert current_trace() == TRACE
        app.info("inside")
        with working(None, {}):
            app.info("in nothing")
    app.info("outside")

    inside, nothing, outside = lines()
    assert inside | {"time": ""} == {
        "time": "",
        "level": "INFO",
        "logger": "app",
        "message": "inside",
        "tenant_id": "acme",
        "user_id": "u",
        "session_id": "s",
        "run_id": "r",
        "trace_id": "ab" * 16,
        "span_id": "cd" * 8,
    }
    assert set(nothing) == set(outside) == {"time", "level", "logger", "message"}


async def test_drivers_policies_tools_and_delegates_log_whose_they_are(
    lines: Any, local_runtime: MakeLocalRuntime
) -> None:
    class Controller:
        async def prepare_run(self, ctx: PolicyContext) -> StepOverrides | None:
            app.info("policy")
            return None

        async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
            return None

    @tool(run_in="thread")
    def in_a_thread() -> str:
        """Logs in a thread."""
        app.info("thread")
        return "x"

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        app.info("driver")
        await services.dispatch(ToolCall(id="c", name="in_a_thread"))
        delegate = await services.delegate(FunctionDriver(_delegate), "x", name="helper")
        return DriverOutput(text=delegate.run_id + (await delegate.result()).text)

    runtime = local_runtime(
        driver=driver(works),
        controller=Controller(),
        tools=[in_a_thread],
        grants=Grants(tool_ids=["in_a_thread"]),
    )
    ids = [Identity(tenant_id="acme", user_id=f"u{number}") for number in range(2)]
    handles = [runtime.start("go", identity=identity, session_id="s") for identity in ids]
    results = [await soon(handle.result()) for handle in handles]

    for identity, result in zip(ids, results, strict=True):
        of_user = [line for line in lines() if line.get("user_id") == identity.user_id]
        assert {(line["message"], line["session_id"], line["run_id"]) for line in of_user} == {
            ("policy", "s", result.run_id),
            ("driver", "s", result.run_id),
            ("thread", "s", result.run_id),
            ("delegate", "s:helper", result.text.removesuffix("x")),
        }
    assert all(line["tenant_id"] == "acme" for line in lines() if line["logger"] == "app")


async def _delegate(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    app.info("delegate")
    return DriverOutput(text="x")


def test_an_exception_tells_its_class_and_places_and_no_foreign_text(lines: Any) -> None:
    def fails() -> None:
        raise ValueError("the prompt: tell me a secret")

    try:
        fails()
    except ValueError:
        app.exception("it failed")
    try:
        try:
            fails()
        except ValueError:
            raise ModelFailed("401 from the server: Authorization: Bearer abc.def-ghi") from None
    except ModelFailed:
        app.exception("again")

    foreign, ours = lines()
    assert foreign["exception"]["type"] == "ValueError"
    assert foreign["exception"]["stack"][-1].endswith(" fails")
    assert "message" not in foreign["exception"]
    assert ours["exception"]["type"] == "retinue.errors.ModelFailed"
    assert ours["exception"]["code"] == "model_failed"
    assert ours["exception"]["message"].startswith("401 from the server")
    assert "abc.def" not in json.dumps(ours)
    assert "secret" not in json.dumps(lines())


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Bearer abc123.def", "abc123"),
        ("api_key=verysecret, next", "verysecret"),
        ('{"apiKey": "verysecret"}', "verysecret"),
        ("OPENAI_API_KEY=verysecret", "verysecret"),
        ("used sk-proj-0123456789abcdef here", "0123456789"),
        ("postgresql://anna:verysecret@host/db", "verysecret"),
        ("password: verysecret", "verysecret"),
    ],
)
def test_what_looks_like_a_credential_is_hidden(text: str, hidden: str) -> None:
    assert hidden not in without_secrets(text)
    assert logs.HIDDEN in without_secrets(text)


@pytest.mark.parametrize(
    "text",
    ["120 tokens used", "max_tokens=12 of 20", "session-1 of acme", "https://host:80/path?x=1", "risk-free"],
)
def test_what_is_no_credential_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_configuring_again_replaces_the_handler(lines: Any) -> None:
    stream = io.StringIO()
    configure(json=False, level="warning", stream=stream)
    app.info("not written")
    app.warning("once")

    assert stream.getvalue().count("once") == 1
    assert lines() == []
    assert logs.configured() == LogOptions(format="text", level="WARNING")


def test_a_process_follows_its_environment_then_what_it_is_told(
    lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_process(LogOptions(format="text"))
    assert logs.configured() == LogOptions(format="json"), "whoever configured it first stays"

    monkeypatch.setattr(logs, "_options", None)
    configure_process(None)
    assert logs.configured() is None

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv(logs.LOG_VARIABLE, "json")
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "error")
    configure_process(LogOptions(format="text"))
    assert logs.configured() == LogOptions(format="json", level="ERROR")


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({}, None),
        ({"RETINUE_LOG": ""}, None),
        ({"RETINUE_LOG": "JSON"}, LogOptions(format="json")),
        ({"RETINUE_LOG": "text", "RETINUE_LOG_LEVEL": "debug"}, LogOptions(format="text", level="DEBUG")),
    ],
)
def test_the_environment_is_read(environment: dict[str, str], options: LogOptions | None) -> None:
    assert from_environment(environment) == options


@pytest.mark.parametrize(
    "environment", [{"RETINUE_LOG": "xml"}, {"RETINUE_LOG": "json", "RETINUE_LOG_LEVEL": "loud"}]
)
def test_what_the_environment_cannot_say_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ValidationFailed):
        from_environment(environment)


def test_trace_ids_are_read() -> None:
    assert trace_ids(TRACE) == ("ab" * 16, "cd" * 8)
    assert trace_ids({}) is None
    assert trace_ids({"traceparent": "nonsense"}) is None
