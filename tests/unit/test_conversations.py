"""A conversation is the user's: forks, other answers to an earlier turn, exports, deletion, attestations."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from retinue import DriverOutput, ExecutionServices, Identity, RunRequest, Runtime
from retinue.errors import InputError, NotFound, SessionConflict
from retinue.exports import SessionExport
from retinue.messages import ToolCall, assistant, tool_result, user
from retinue.store import Origin
from tests.conftest import MakeLocalRuntime
from tests.support import all_events, driver, flag, soon, user_text


@driver
async def talks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Calls a tool and answers, and counts its turns in the state."""
    said = user_text(request.input)
    if said == "hold":
        flag(f"{request.run_id} runs").set()
        await flag(f"{request.run_id} go").wait()
    if said == "fail":
        services.append([user(said)])
        raise ValueError("as asked")
    turn = services.state.get("turns", 0)
    services.state["turns"] = turn + 1
    call = ToolCall(f"call-{turn}", "look", {})
    services.append(
        [user(said), assistant("", [call]), tool_result(call.id, "seen"), assistant(f"answer to {said}")]
    )
    return DriverOutput(text=f"answer to {said}")


class Talk:
    """A user's session with some turns in it."""

    def __init__(self, runtime: Runtime, identity: Identity, session_id: str) -> None:
        self.runtime = runtime
        self.sessions = runtime.sessions
        self.identity = identity
        self.session_id = session_id

    async def say(self, *texts: str, session_id: str | None = None) -> None:
        for text in texts:
            await soon(
                self.runtime.run(text, identity=self.identity, session_id=session_id or self.session_id)
            )

    async def said(self, session_id: str | None = None) -> list[str]:
        snapshot = await self.sessions.latest(self.identity, session_id or self.session_id)
        return [message.text for message in snapshot.history if message.role == "user"]


@pytest.fixture
def talk(local_runtime: MakeLocalRuntime, identity: Identity, session_id: str) -> Talk:
    return Talk(local_runtime(driver=talks), identity, session_id)


async def test_a_fork_goes_its_own_way_and_the_first_session_stays(talk: Talk) -> None:
    await talk.say("one", "two", "three")
    forked = await talk.sessions.fork(talk.identity, talk.session_id, at=2, new_session_id="branch")
    assert (forked.session_id, forked.revision, forked.messages, forked.of_revision) == ("branch", 1, 8, 3)
    snapshot = await talk.sessions.read(talk.identity, "branch")
    assert (snapshot.revision, snapshot.replayable, snapshot.state) == (1, True, {"turns": 3})
    assert snapshot.origin == Origin(session_id=talk.session_id, revision=3, messages=8)
    await talk.say("another three", session_id="branch")
    assert await talk.said("branch") == ["one", "two", "another three"]
    assert await talk.said() == ["one", "two", "three"]
    assert (await talk.sessions.read(talk.identity, "branch")).revision == 2


@pytest.mark.parametrize(("at", "kept"), [(None, 2), (0, 0), (1, 1), (2, 2), (-1, 1), (-2, 0)])
async def test_turns_are_counted_from_either_end(talk: Talk, at: int | None, kept: int) -> None:
    await talk.say("one", "two")
    forked = await talk.sessions.fork(talk.identity, talk.session_id, at=at, keep_state=False)
    snapshot = await talk.sessions.read(talk.identity, forked.session_id)
    assert len(snapshot.history) == kept * 4
    assert snapshot.state == {}


async def test_forks_that_cannot_be(talk: Talk) -> None:
    await talk.say("one")
    for options in ({"at": 2}, {"at": -2}, {"at": 1.0}, {"at": True}, {"new_session_id": talk.session_id}):
        with pytest.raises(InputError):
            await talk.sessions.fork(talk.identity, talk.session_id, **options)
    await talk.say("x", session_id="taken")
    with pytest.raises(SessionConflict):
        await talk.sessions.fork(talk.identity, talk.session_id, new_session_id="taken")
    assert await talk.said("taken") == ["x"]


async def test_a_fork_does_not_wait_for_a_run_and_has_what_was_committed(talk: Talk) -> None:
    await talk.say("one")
    running = talk.runtime.start("hold", identity=talk.identity, session_id=talk.session_id)
    await flag(f"{running.run_id} runs").wait()
    forked = await talk.sessions.fork(talk.identity, talk.session_id)
    assert await talk.said(forked.session_id) == ["one"]
    flag(f"{running.run_id} go").set()
    assert (await soon(running.result())).status == "completed"
    assert await talk.said() == ["one", "hold"]


async def test_forks_and_runs_at_once_never_tear_a_turn(talk: Talk) -> None:
    async def forks() -> list[int]:
        sizes = []
        for _ in range(20):
            forked = await talk.sessions.fork(talk.identity, talk.session_id)
            sizes.append(forked.messages)
        return sizes

    sizes, _ = await asyncio.gather(forks(), talk.say(*(f"turn {number}" for number in range(10))))
    assert all(size % 4 == 0 for size in sizes)
    assert sizes == sorted(sizes)


async def test_another_answer_to_an_earlier_turn_is_a_branch(talk: Talk) -> None:
    await talk.say("one", "two", "three")
    handle = await talk.runtime.regenerate(
        identity=talk.identity, session_id=talk.session_id, turn=1, input="two, but better"
    )
    assert (await soon(handle.result())).text == "answer to two, but better"
    assert handle.session_id != talk.session_id
    assert await talk.said(handle.session_id) == ["one", "two, but better"]
    again = await talk.runtime.regenerate(identity=talk.identity, session_id=talk.session_id)
    assert (await soon(again.result())).text == "answer to three"
    assert await talk.said(again.session_id) == ["one", "two", "three"]
    assert await talk.said() == ["one", "two", "three"]
    with pytest.raises(InputError):
        await talk.runtime.regenerate(identity=talk.identity, session_id=talk.session_id, turn=3)


async def test_a_deleted_session_is_as_if_it_had_never_been(talk: Talk) -> None:
    await talk.say("one", "two")
    handle = talk.runtime.start("three", identity=talk.identity, session_id=talk.session_id)
    await soon(handle.result())
    await talk.sessions.delete(talk.identity, talk.session_id)
    snapshot = await talk.sessions.latest(talk.identity, talk.session_id)
    assert (snapshot.history, snapshot.state, snapshot.revision) == ([], {}, 0)
    assert await talk.sessions.list(talk.identity) == ()
    with pytest.raises(NotFound):
        await soon(talk.runtime.attach(handle.run_id, identity=talk.identity).accepted())
    await talk.say("a new beginning")
    assert await talk.said() == ["a new beginning"]
    assert (await talk.sessions.latest(talk.identity, talk.session_id)).revision == 1
    await talk.sessions.delete(talk.identity, "never was")


async def test_a_session_with_a_run_is_not_deleted(talk: Talk) -> None:
    running = talk.runtime.start("hold", identity=talk.identity, session_id=talk.session_id)
    await flag(f"{running.run_id} runs").wait()
    with pytest.raises(SessionConflict) as refused:
        await talk.sessions.delete(talk.identity, talk.session_id)
    assert refused.value.run_id == running.run_id
    flag(f"{running.run_id} go").set()
    assert (await soon(running.result())).status == "completed"


async def test_all_of_a_user_goes_and_nothing_of_another(talk: Talk) -> None:
    other = Talk(talk.runtime, Identity(tenant_id="acme", user_id="somebody else"), talk.session_id)
    for session_id in ("a", "b", "c"):
        await talk.say("mine", session_id=session_id)
    await other.say("theirs")
    assert [each.session_id for each in await talk.sessions.list(talk.identity, limit=2)] == ["a", "b"]
    assert [each.session_id for each in await talk.sessions.list(talk.identity, after="b")] == ["c"]
    exported = [each.session_id async for each in talk.sessions.export_user(talk.identity)]
    assert exported == ["a", "b", "c"]
    assert await talk.sessions.delete_user(talk.identity) == ["a", "b", "c"]
    assert await talk.sessions.list(talk.identity) == ()
    assert await other.said() == ["theirs"]


async def test_an_export_has_everything_that_is_kept(talk: Talk) -> None:
    await talk.say("one")
    handle = talk.runtime.start("two", identity=talk.identity, session_id=talk.session_id)
    await soon(handle.result())
    export = await talk.sessions.export(talk.identity, talk.session_id)
    assert [message.text for message in export.session.history if message.role == "user"] == ["one", "two"]
    assert export.session.state == {"turns": 2}
    assert [run.input for run in export.runs] == ["one", "two"]
    assert export.runs[1].run_id == handle.run_id
    assert export.runs[1].events[-1] == (await all_events(handle))[-1]
    assert export.approvals == []
    read_back = msgspec.json.decode(export.to_json(), type=SessionExport)
    assert read_back.to_json() == export.to_json()


async def test_vouching_for_a_partial_transcript_is_kept_with_who_and_why(talk: Talk) -> None:
    await talk.say("one", "fail")
    assert (await talk.sessions.latest(talk.identity, talk.session_id)).replayable is False
    revision = await talk.sessions.mark_replayable(
        talk.identity, talk.session_id, by="ops", why="read it; nothing is missing"
    )
    assert revision == 3
    snapshot = await talk.sessions.read(talk.identity, talk.session_id)
    assert (snapshot.replayable, snapshot.revision) == (True, 3)
    (attestation,) = snapshot.attestations
    assert (attestation.by, attestation.why, attestation.revision) == (
        "ops", "read it; nothing is missing", 2,
    )  # fmt: skip
    again = await talk.sessions.mark_replayable(talk.identity, talk.session_id, by="ops", why="again")
    assert again == 3
    await talk.say("two")
    assert (await talk.sessions.read(talk.identity, talk.session_id)).replayable is True
    for wrong in ({"by": "", "why": "x"}, {"by": "x", "why": ""}):
        with pytest.raises(InputError):
            await talk.sessions.mark_replayable(talk.identity, talk.session_id, **wrong)
