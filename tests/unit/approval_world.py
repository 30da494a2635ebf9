"""One run with its desk over a memory store, whose approval operations can be held back or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from retinue import Approvals, Identity
from retinue.approval_desk import ApprovalDesk, ApprovalOutcome
from retinue.approvals import ApprovalRequest, ApprovalState
from retinue.drivers import RunRequest
from retinue.errors import RetinueError, StoreUnavailable
from retinue.events import ApprovalRequested, ApprovalResolved, Payload
from retinue.grants import Grants
from retinue.ids import SessionAddress
from retinue.protocol import DecideRequest
from retinue.storage import this_process
from retinue.storage.memory import MemoryEngine
from retinue.store import LeaseGrant, ListApprovals, OpenApproval, RunRecord, SettleApproval, Store
from retinue.stored import StoredApproval
from tests.support import Flag, soon

WHO = Identity(tenant_id="acme", user_id="ann")


class Engine(MemoryEngine):
    """A memory store that can hold operations back, or fail, before or after doing them."""

    def __init__(self) -> None:
        super().__init__()
        self.hold: dict[type, Flag] = {}
        self.arrived: dict[type, Flag] = {OpenApproval: Flag(), SettleApproval: Flag()}
        self.fail: dict[type, RetinueError] = {}
        self.lose_answers = 0
        """So many operations are done, and then nobody hears of it."""

    async def execute(self, operations: Any) -> Any:
        for operation in operations:
            kind = type(operation)
            if kind in self.arrived:
                self.arrived[kind].set()
            if kind in self.hold:
                await self.hold[kind].wait()
            if kind in self.fail:
                raise self.fail[kind]
        replies = await super().execute(operations)
        if self.lose_answers and isinstance(operations[0], SettleApproval):
            self.lose_answers -= 1
            raise StoreUnavailable("the answer is lost")
        return replies


class World:
    """A run, its desk, and what was told of it."""

    def __init__(self, engine: Engine, grant: LeaseGrant, approvals: Approvals, run_id: str) -> None:
        self.engine = engine
        self.store = Store(engine)
        self.lease = grant.lease
        self.events: list[Payload] = []
        self.notified: list[ApprovalRequest] = []
        self.changes: list[int] = []
        """Requests pending, at each change."""
        self.on_event: Callable[[Payload], None] = lambda payload: None
        self.run_id = run_id
        self.desk = ApprovalDesk(
            RunRequest(
                input="x",
                identity=WHO,
                session_id="s",
                run_id=run_id,
                attempt_id="attempt",
                parent_run_id=None,
                root_run_id="label",
                deadline=None,
                grants=Grants(),
                run_mode="execute",
            ),
            approvals,
            store=self.store,
            lease=self.lease,
            emit=self._emit,
            notify=self.notified.append,
            on_change=lambda: self.changes.append(len(self.desk.pending)),
        )

    def _emit(self, payload: Payload) -> None:
        self.events.append(payload)
        self.on_event(payload)

    def ask(
        self,
        tool: str = "pay",
        arguments: bytes = b'{"amount":3}',
        run_id: str | None = None,
        reason: str = "",
    ) -> asyncio.Task[ApprovalOutcome]:
        return asyncio.ensure_future(
            self.desk.ask(
                run_id=run_id or self.run_id,
                agent_name="" if run_id is None else run_id,
                tool_name=tool,
                arguments=arguments,
                reason=reason,
            )
        )

    async def shown(self, count: int = 1) -> list[ApprovalRequest]:
        """The pending requests, once there are so many."""

        async def wait() -> None:
            while len(self.desk.pending) < count:
                await asyncio.sleep(0)

        await soon(wait())
        return list(self.desk.pending)

    async def decide(
        self, approval_id: str, approve: bool = True, by: str = "bob", reason: str = ""
    ) -> StoredApproval:
        decision = DecideRequest(
            run_id=self.run_id, approval_id=approval_id, approve=approve, by=by, reason=reason
        )
        stands: StoredApproval = await soon(self.desk.decide(decision))
        return stands

    async def stored(self, approval_id: str) -> StoredApproval:
        found = await self.store.read_approval(WHO, approval_id)
        assert found is not None
        return found

    async def states(self) -> list[tuple[str, ApprovalState]]:
        page = await self.store.list_approvals(ListApprovals(tenant_id=WHO.tenant_id))
        return [(each.tool_name, each.state) for each in page.approvals]

    @property
    def told(self) -> list[tuple[str, str]]:
        """The events of the desk: kind or state, and the approval id."""
        return [
            ("requested", each.request.id)
            if isinstance(each, ApprovalRequested)
            else (each.state, each.approval_id)
            for each in self.events
            if isinstance(each, ApprovalRequested | ApprovalResolved)
        ]


async def world(run_id: str = "r", **options: Any) -> World:
    engine = Engine()
    store = Store(engine)
    address = SessionAddress(store_id=store.store_id, tenant_id="acme", user_id="ann", session_id="s")
    grant = await store.acquire(address, this_process("host", "test"))
    record = RunRecord(
        tenant_id="acme",
        user_id="ann",
        session_id="s",
        run_id=run_id,
        root_run_id=run_id,
        app="app",
        input=b'"x"',
        created_at=0.0,
    )
    await store.open_run(grant.lease, record)
    return World(engine, grant, Approvals(**options), run_id)
