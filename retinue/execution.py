"""Running a driver with its services, on a user loop: the same for a run's root and for a delegate."""

from __future__ import annotations

import asyncio

import msgspec

from retinue.agents import Agent
from retinue.drivers import ExecutionDriver, RunRequest
from retinue.errors import RetinueError
from retinue.messages import check_structure
from retinue.protocol import Finished, encode_output
from retinue.results import DriverOutput, Reason
from retinue.services import ExecutionServices


class DriverExecution:
    """One execution of a driver. Create and run it on a user loop; cancel it from there too."""

    def __init__(self, work: Agent | ExecutionDriver, request: RunRequest, services: ExecutionServices) -> None:
        self._work = work
        self._request = request
        self._services = services
        self._task: asyncio.Task[Finished] | None = None

    async def run(self) -> Finished:
        """Run to the end, owned work included. Never raises: what escaped is in the message."""
        self._task = asyncio.ensure_future(self._run())
        if self._services.cancelled:
            self._task.cancel()
        await asyncio.wait([self._task])
        if self._task.cancelled():  # before it began
            return self._finished(cancelled=True)
        return self._task.result()

    def cancel(self) -> None:
        """Tell tools that the run is ending, and interrupt the driver at its next await."""
        self._services.cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> Finished:
        state_before = msgspec.json.encode(self._services.state)
        try:
            output = await self._output()
            await self._services.settle_owned()
            finished = self._finished(output=encode_output(output))
        except asyncio.CancelledError:
            await self._services.cancel_owned()
            if self._services.cancelled:
                finished = self._finished(cancelled=True)
            else:
                why = Reason("execution_failed", "the driver was cancelled from inside")
                finished = self._finished(error={"code": why.code, "message": why.message})
        except Exception as error:
            await self._services.cancel_owned()
            finished = self._finished(error=error_payload(error))
        return self._with_state(finished, state_before)

    async def _output(self) -> DriverOutput:
        work = self._work
        if isinstance(work, Agent):
            from retinue.agent_loop import agent_driver

            work = agent_driver(work)
        output = await work.start(self._request, self._services)
        if not isinstance(output, DriverOutput):
            raise RetinueError(
                f"driver {work.id} returned {type(output).__name__}; it must return a DriverOutput",
                code="execution_failed",
            )
        if problem := output.problem():
            raise RetinueError(f"driver {work.id} returned a bad output: {problem}", code="execution_failed")
        self._extend_history(output)
        return output

    def _extend_history(self, output: DriverOutput) -> None:
        if output.history is None:
            return
        current = self._services.history
        returned = list(output.history)
        if returned[: len(current)] != current:
            raise RetinueError(
                "the history that the driver returned does not extend the session's", code="execution_failed"
            )
        try:
            check_structure(returned)
        except ValueError as error:
            raise RetinueError(f"the driver's history is broken: {error}", code="execution_failed") from None
        self._services.append(returned[len(current) :])

    def _finished(
        self, *, output: bytes | None = None, error: dict[str, object] | None = None, cancelled: bool = False
    ) -> Finished:
        return Finished(
            participant=self._services.participant,
            output=output,
            error=error,
            cancelled=cancelled,
            transcript=() if self._services.participant == "" else tuple(self._services.transcript),
        )

    def _with_state(self, finished: Finished, before: bytes) -> Finished:
        try:
            after = msgspec.json.encode(self._services.state)
        except (TypeError, ValueError) as error:
            problem = {"code": "execution_failed", "message": f"session state is not JSON: {error}"}
            return finished if finished.error else self._finished(error=problem)
        return finished if after == before else msgspec.structs.replace(finished, state=after)


def error_payload(error: BaseException) -> dict[str, object]:
    """An error that escaped, for another process: its code and text, never its traceback."""
    if isinstance(error, RetinueError):
        return error.to_payload()
    reason = Reason.of(error)
    # Text that UTF-8 cannot carry must not keep the message from arriving.
    text = reason.message.encode("utf-8", "backslashreplace").decode()
    return {"code": reason.code, "message": text}


