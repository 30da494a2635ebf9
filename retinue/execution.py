"""Running a driver with its services, on a user loop: the same for a run's root and for a delegate."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from retinue.agents import Agent
from retinue.drivers import ExecutionDriver, RunRequest
from retinue.errors import RetinueError
from retinue.json_values import encode_json
from retinue.messages import check_structure, escape_surrogates
from retinue.protocol import Finished, decode_output, encode_output
from retinue.results import DriverOutput, Reason
from retinue.services import ExecutionServices


class DriverExecution:
    """One execution of a driver. Create and run it on a user loop; cancel it from there too."""

    def __init__(
        self, work: Agent | ExecutionDriver, request: RunRequest, services: ExecutionServices
    ) -> None:
        self._work = work
        self._request = request
        self._services = services
        self._driving: asyncio.Task[bytes] | None = None

    async def run(self) -> Finished:
        """Run to the end, owned work included. Never raises: what escaped is in the message."""
        services = self._services
        state_before = msgspec.json.encode(services.state)
        self._driving = asyncio.ensure_future(self._drive())
        if services.cancelled:
            self._driving.cancel()
        await asyncio.wait([self._driving])
        cancelled, services.cancelled = services.cancelled, True
        # Outside of the task that cancel() interrupts, so that nothing is left however the driver ended.
        await services.owned.cancel()
        services.owned.end()
        return self._with_state(self._outcome(self._driving, cancelled=cancelled), state_before)

    def cancel(self) -> None:
        """Tell tools that the run is ending, and interrupt the driver at its next await. Once is enough."""
        if self._services.cancelled:
            return
        self._services.cancelled = True
        if self._driving is not None:
            self._driving.cancel()

    async def _drive(self) -> bytes:
        """The driver's output, encoded, once the work that it owns has settled."""
        work = self._work
        if isinstance(work, Agent):
            from retinue.agent_loop import agent_driver

            work = agent_driver(work)
        try:
            output = await work.start(self._request, self._services)
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio would let these out of the loop that all drivers share.
            raise RetinueError(
                f"driver {work.id} raised {type(error).__name__}: {error}", code="execution_failed"
            ) from None
        if not isinstance(output, DriverOutput):
            raise RetinueError(
                f"driver {work.id} returned {type(output).__name__}; it must return a DriverOutput",
                code="execution_failed",
            )
        if problem := output.problem():
            raise RetinueError(f"driver {work.id} returned a bad output: {problem}", code="execution_failed")
        encoded = _encoded(output, work.id)
        self._extend_history(output)
        await self._services.owned.settle()
        return encoded

    def _extend_history(self, output: DriverOutput) -> None:
        if output.history is None:
            return
        current = self._services.history
        returned = list(output.history)
        if returned[: len(current)] != current:
            raise RetinueError(
                "the history that the driver returned does not extend the session's", code="execution_failed"
            )
        added = returned[len(current) :]
        try:
            check_structure(added)
        except (ValueError, AttributeError) as error:
            raise RetinueError(f"the driver's history is broken: {error}", code="execution_failed") from None
        self._services.append(added)

    def _outcome(self, driving: asyncio.Task[bytes], *, cancelled: bool) -> Finished:
        if cancelled:
            if not driving.cancelled():
                driving.exception()  # what a driver raises on its way out is nobody's any more
            return self._finished(cancelled=True)
        if driving.cancelled():
            return self._failed("the driver was cancelled from inside")
        error = driving.exception()
        if error is not None:
            return self._finished(error=error_payload(error))
        return self._finished(output=driving.result())

    def _failed(self, why: str) -> Finished:
        return self._finished(error={"code": "execution_failed", "message": why})

    def _finished(
        self, *, output: bytes | None = None, error: dict[str, Any] | None = None, cancelled: bool = False
    ) -> Finished:
        return Finished(
            participant=self._services.participant,
            output=output,
            error=error,
            cancelled=cancelled,
            transcript=() if self._services.participant == "" else tuple(self._services.transcript),
        )

    def _with_state(self, finished: Finished, before: bytes) -> Finished:
        state: object = self._services.state
        try:
            if not isinstance(state, dict):
                raise TypeError(f"it is {type(state).__name__}, not a dict")
            after = encode_json(state)
        except Exception as error:
            problem = f"the session state cannot be written as JSON: {error}"
            return finished if finished.error or finished.cancelled else self._failed(problem)
        return finished if after == before else msgspec.structs.replace(finished, state=after)


def _encoded(output: DriverOutput, driver_id: str) -> bytes:
    """The output as its reader gets it; members of a wrong type are found here, with the driver's name."""
    try:
        encode_json(output.structured)
        encoded = encode_output(output)
        decode_output(encoded)
    except Exception as error:
        raise RetinueError(
            f"driver {driver_id} returned a bad output: {error}", code="execution_failed"
        ) from None
    return encoded


def error_payload(error: BaseException) -> dict[str, Any]:
    """An error that escaped, for another process: its code and text, never its traceback.

    Of a group, the first one counts, so that a refusal in a task group is still a refusal. Text that UTF-8
    cannot carry, or data that is no JSON, must not keep it from arriving.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = Reason.of(error)
    if isinstance(error, RetinueError):
        with contextlib.suppress(Exception):
            payload = error.to_payload()
            msgspec.json.encode(payload)
            return payload
    return {"code": escape_surrogates(str(reason.code)), "message": escape_surrogates(reason.message)}
