"""What the rules of the store kit are written with: a trial of one engine, and checks that say what came."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from retinue.errors import RetinueError
from retinue.ids import Identity, SessionAddress
from retinue.store import (
    Attestation,
    CommitSession,
    FinishRun,
    ForkSession,
    Holder,
    Lease,
    LeaseGrant,
    MarkReplayable,
    Refused,
    RunOutcome,
    RunRecord,
    Store,
    StoredApproval,
    StoredArtifact,
    StoredEvent,
    StoreEngine,
    StoreReply,
)

OpenEngine = Callable[[str], Awaitable[StoreEngine]]
"""Opens the store of a name: empty at first; the same again, where durable, once its engine was closed."""


class StoreRuleBroken(AssertionError):
    """An engine does not do what the seam says; the text says which rule, and what came instead."""


class StoreRule(msgspec.Struct, frozen=True):
    """One rule of the seam."""

    name: str
    text: str
    """The rule in words."""
    body: Callable[[Trial], Awaitable[None]]

    async def check(self, open_engine: OpenEngine) -> None:
        """Raise :class:`StoreRuleBroken` unless an engine that ``open_engine`` opens keeps this rule."""
        trial = Trial(open_engine, f"{self.name}-{uuid.uuid4().hex[:8]}")
        await trial.open()
        try:
            await self.body(trial)
        except StoreRuleBroken as broken:
            raise StoreRuleBroken(f"{self.name}: {broken}\nThe rule: {self.text}") from broken
        except RetinueError as error:
            text = f"{self.name}: refused with {error.code}: {error}\nThe rule: {self.text}"
            raise StoreRuleBroken(text) from error
        finally:
            await trial.close()


class Trial:
    """An engine under trial, on a store of its own."""

    engine: StoreEngine
    store: Store

    def __init__(self, open_engine: OpenEngine, name: str) -> None:
        self._open_engine = open_engine
        self._name = name

    async def open(self) -> None:
        """Open the store, or open it again."""
        self.engine = await self._open_engine(self._name)
        self.store = Store(self.engine)

    async def close(self) -> None:
        await self.engine.close()

    def address(
        self, session_id: str = "session", tenant: str = "tenant", user: str = "user"
    ) -> SessionAddress:
        return SessionAddress(
            store_id=self.engine.store_id, tenant_id=tenant, user_id=user, session_id=session_id
        )

    async def acquire(self, holder_id: str = "holder", address: SessionAddress | None = None) -> LeaseGrant:
        return await self.store.acquire(address or self.address(), live_holder(holder_id))

    async def lease(self, session_id: str = "session") -> Lease:
        """A lease of a session that nobody has."""
        return (await self.acquire(address=self.address(session_id))).lease

    async def run(self, lease: Lease, run_id: str = "run") -> RunRecord:
        """A run opened under a lease."""
        return await self.store.open_run(lease, record_of(lease.address, run_id))

    async def replies(self, *operations: Any) -> Sequence[StoreReply]:
        """What the engine answers to one list of operations."""
        return await self.engine.execute(operations)


STORE_RULES: dict[str, StoreRule] = {}
"""Every rule by its name; the modules of rules register theirs when they are imported."""

OWNER = Identity(tenant_id="tenant", user_id="user")
"""Whose sessions a trial uses, unless it says otherwise."""
STRANGER = Identity(tenant_id="other", user_id="user")


def rule(body: Callable[[Trial], Awaitable[None]]) -> Callable[[Trial], Awaitable[None]]:
    """Register a rule: its name is the function's, its text the docstring."""
    name = body.__name__
    STORE_RULES[name] = StoreRule(name, " ".join((body.__doc__ or "").split()), body)
    return body


def live_holder(holder_id: str) -> Holder:
    """A holder that nobody can prove gone: its process is on a machine that is not this one."""
    return Holder(holder_id=holder_id, cluster_id="trial", boot_id="another machine", pid=1, started_at=0.0)


def record_of(address: SessionAddress, run_id: str) -> RunRecord:
    """The record of a root run that has just begun."""
    return RunRecord(
        tenant_id=address.tenant_id,
        user_id=address.user_id,
        session_id=address.session_id,
        run_id=run_id,
        root_run_id=run_id,
        app="trial",
        input=b'"a question"',
        created_at=1_700_000_000.25,
    )


def commit_of(lease: Lease, base_revision: int, **parts: Any) -> CommitSession:
    """A commit with a fresh id."""
    parts.setdefault("commit_id", f"commit_{uuid.uuid4().hex}")
    return CommitSession(lease=lease, base_revision=base_revision, **parts)


def fork_of(lease: Lease, base_revision: int, target: str, keep_messages: int, **parts: Any) -> ForkSession:
    """A fork to another session of the same user, with a fresh id."""
    parts.setdefault("commit_id", f"fork_{uuid.uuid4().hex}")
    address = msgspec.structs.replace(lease.address, session_id=target)
    return ForkSession(
        lease=lease, base_revision=base_revision, target=address, keep_messages=keep_messages, **parts
    )


def mark_of(lease: Lease, revision: int, **parts: Any) -> MarkReplayable:
    """An attestation with a fresh id; ``parts`` are the attestation's."""
    commit_id = parts.pop("commit_id", f"mark_{uuid.uuid4().hex}")
    told = {"by": "a reviewer", "why": "every call has its result", "at": 1_700_000_001.5, **parts}
    return MarkReplayable(
        lease=lease, commit_id=commit_id, attestation=Attestation(revision=revision, **told)
    )


def artifact_of(artifact_id: str = "artifact", data: bytes = b"data") -> StoredArtifact:
    return StoredArtifact(artifact_id=artifact_id, mime_type="text/plain", data=data)


def outcome_of(
    run_id: str = "run", outcome: bytes = b'{"status":"completed"}', cursor: int = 5
) -> RunOutcome:
    return RunOutcome(run_id=run_id, outcome=outcome, final_cursor=cursor)


def approval_of(
    address: SessionAddress, approval_id: str, run_id: str = "run", **parts: Any
) -> StoredApproval:
    """A new request of a run."""
    return StoredApproval(
        approval_id=approval_id,
        tenant_id=address.tenant_id,
        user_id=address.user_id,
        session_id=address.session_id,
        run_id=run_id,
        tool_name="pay",
        digest="d" * 64,
        **{
            "request": f'{{"id":"{approval_id}"}}'.encode(),
            "requested_at": 1.0,
            "expires_at": 301.0,
            **parts,
        },
    )


def expect(condition: bool, what: str) -> None:
    """Raise :class:`StoreRuleBroken` unless ``condition``."""
    if not condition:
        raise StoreRuleBroken(what)


def expect_equal(found: object, wanted: object, what: str) -> None:
    """Raise :class:`StoreRuleBroken` unless ``found`` equals ``wanted``; lists and tuples may be equal."""
    if _plain(found) != _plain(wanted):
        raise StoreRuleBroken(f"{what}: {found!r} came, not {wanted!r}")


async def expect_refused(code: str, call: Awaitable[object], what: str) -> RetinueError:
    """The error that refuses ``call``; raises :class:`StoreRuleBroken` unless its code is ``code``."""
    try:
        reply = await call
    except RetinueError as error:
        if error.code == code:
            return error
        raise StoreRuleBroken(f"{what}: refused with {error.code}, not {code} ({error})") from error
    raise StoreRuleBroken(f"{what}: not refused, but answered {reply!r}")


def refused_code(reply: StoreReply) -> str | None:
    """The code of a refusal; ``None`` for another reply."""
    return str(reply.error["code"]) if isinstance(reply, Refused) else None


def _plain(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


WRITES_OF_A_RUN = ("commit", "append_events", "finish_run", "begin_run", "open_approval", "settle_approval")
"""Those of :func:`writes_under` that need the run that they name, or a request of it."""


def writes_under(trial: Trial, lease: Lease) -> dict[str, Callable[[], Awaitable[object]]]:
    """One call of each writing operation under a lease, for the run called ``run`` and from revision 0.

    The last one deletes the session.
    """
    store = trial.store
    return {
        "commit": lambda: store.commit(commit_of(lease, 0, outcome=outcome_of())),
        "replace": lambda: store.replace(lease, []),
        "open_run": lambda: store.open_run(lease, record_of(lease.address, "a new run")),
        "begin_run": lambda: store.begin_run(lease, "run"),
        "append_events": lambda: store.append_events(lease, "run", [StoredEvent(1, b"x")]),
        "finish_run": lambda: store.finish_run(FinishRun(lease=lease, outcome=outcome_of())),
        "open_approval": lambda: store.open_approval(lease, approval_of(lease.address, "run:1")),
        "settle_approval": lambda: store.settle_approval(lease, "run:1", "denied", at=2.0),
        "put_artifacts": lambda: store.put_artifacts(lease, [artifact_of()]),
        "fork": lambda: store.fork(fork_of(lease, 0, "a new session", 0)),
        "mark_replayable": lambda: store.mark_replayable(mark_of(lease, 0)),
        "delete": lambda: store.delete(lease),
    }
