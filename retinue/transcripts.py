"""What an execution says and hears, as it is recorded: canonical history, and conversations beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from retinue.errors import InputError, Unsupported
from retinue.ids import check_id
from retinue.messages import Message, ToolPairing, decode_message, encode_message
from retinue.protocol import Record


class Transcript:
    """The conversation of one execution. Belongs to its user loop.

    Args:
        history: messages before it, encoded.
        run_id: of the execution.
        is_root: it extends the session's canonical history; a delegate's stays its own.
        tell: sends a record to the root.
    """

    def __init__(
        self, history: Sequence[bytes], *, run_id: str, is_root: bool, tell: Callable[[Record], None]
    ) -> None:
        self.recorded: list[bytes] = []
        """Encoded messages of this execution's own conversation."""
        self._history = list(history)
        self._run_id = run_id
        self._is_root = is_root
        self._tell = tell
        self._pairing = ToolPairing()
        self._other_pairings: dict[str, ToolPairing] = {}

    @property
    def history(self) -> list[Message]:
        """A fresh copy of the canonical conversation; a delegate starts with none."""
        return [decode_message(body) for body in self._history]

    def append(self, messages: Sequence[Message]) -> None:
        """Add messages to canonical history; see :meth:`retinue.ExecutionServices.append`."""
        self._record(messages, conversation=not self._is_root)

    def record(self, messages: Sequence[Message], execution_id: str | None) -> None:
        """Add messages to a conversation; see :meth:`retinue.ExecutionServices.record_conversation`."""
        if execution_id is None or execution_id == self._run_id:
            self._record(messages, conversation=True)
            return
        check_id("execution_id", execution_id)
        if not self._is_root:
            raise Unsupported(
                "a delegate records its own conversation only", operation="execution_id in a delegate"
            )
        pairing, bodies = _paired(self._other_pairings.get(execution_id) or ToolPairing(), messages)
        self._tell(Record(conversation=bodies, execution_id=execution_id))
        self._other_pairings[execution_id] = pairing

    def _record(self, messages: Sequence[Message], *, conversation: bool) -> None:
        pairing, bodies = _paired(self._pairing, messages)
        if self._is_root:
            self._tell(
                Record(
                    canonical=bodies,
                    conversation=bodies if conversation else (),
                    execution_id=self._run_id,
                )
            )
            self._history.extend(bodies)
        if conversation:
            self.recorded.extend(bodies)
        self._pairing = pairing


def _paired(before: ToolPairing, messages: Sequence[Message]) -> tuple[ToolPairing, list[bytes]]:
    """The messages, encoded, and the pairing of calls and results after them; neither is changed here."""
    bodies = [encode_message(message) for message in messages]
    pairing = copy.deepcopy(before)
    for index, message in enumerate(messages):
        try:
            pairing.add(message)
        except ValueError as error:
            raise InputError(f"messages[{index}] {error}") from None
    return pairing, bodies
