"""Groups of a conversation, and what a projection of it may change (contract section 9).

A group is what is kept or dropped as one: a user message up to the next one, with all its rounds of tools.
Under the grouping ``tool_roundtrip`` a group also ends with the last result of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from retinue.errors import RetinueError
from retinue.messages import Message

Grouping = Literal["user_turn", "tool_roundtrip"]
SOURCE = "source"
"""Key of ``Message.extras`` under which a message from a context source says where it is from."""


@dataclass
class Group:
    """Messages that belong together."""

    messages: list[Message] = field(default_factory=list)
    open_calls: set[str] = field(default_factory=set)
    """Calls that have no result in it."""

    @property
    def protected(self) -> bool:
        """It is kept whole or dropped whole."""
        return any(is_protected(message) for message in self.messages)


def is_source(message: Message) -> bool:
    """It came from a context source, and says so."""
    return bool(message.extras) and set(message.extras or ()) == {SOURCE}


def has_continuation(message: Message) -> bool:
    """It carries opaque data of a provider, which another model cannot go on from."""
    return bool(message.extras) and not is_source(message)


def is_protected(message: Message) -> bool:
    """A tool message, or an assistant message with calls or provider data: nobody may add or change one."""
    return message.role == "tool" or (
        message.role == "assistant" and (bool(message.tool_calls) or has_continuation(message))
    )


def grouped(messages: Sequence[Message], grouping: Grouping = "user_turn") -> list[Group]:
    """The groups of a conversation, in order, without its system messages.

    Raises:
        RetinueError: an orphan or a second result, calls that overlap or repeat an id, or a message before
            all results are there; ``messages[<index>]`` is named.
    """
    groups: list[Group] = []
    seen: set[str] = set()
    closed = True
    for index, message in enumerate(messages):
        if message.role == "system":
            continue
        group = groups[-1] if groups else None
        if message.role == "tool":
            if group is None or message.tool_call_id not in group.open_calls:
                raise _broken(index, f"answers the call {message.tool_call_id!r}, which is not open")
            group.messages.append(message)
            group.open_calls.discard(message.tool_call_id)
            closed = grouping == "tool_roundtrip" and not group.open_calls
            continue
        if group is not None and group.open_calls:
            raise _broken(index, f"comes before the results of {sorted(group.open_calls)}")
        if group is None or message.role == "user" or closed:
            group = Group()
            groups.append(group)
        closed = False
        ids = [call.id for call in message.tool_calls]
        if len(set(ids)) != len(ids) or not all(ids) or seen & set(ids):
            raise _broken(index, f"has an empty or repeated call id: {ids}")
        seen.update(ids)
        group.messages.append(message)
        group.open_calls.update(ids)
    return groups


def check_projection(
    before: Sequence[Message], after: Sequence[Message], grouping: Grouping = "user_turn"
) -> None:
    """Raise ``RetinueError`` unless ``after`` is a projection of ``before`` that a model may be sent.

    System messages stay as they are. A protected group is kept whole or dropped whole; the last group, and
    one with calls that wait, must stay. Order stays. A message of a source may be dropped, but neither
    changed nor called something else. Other messages may be dropped, changed and added.
    """
    if [item for item in before if item.role == "system"] != [
        item for item in after if item.role == "system"
    ]:
        raise _rejected("system messages must stay as they are, in their order (system)")
    old, new = grouped(before, grouping), grouped(after, grouping)
    _check_protected(old, after)
    _check_sources(before, after)
    _check_last(old, new)


def _check_protected(old: Sequence[Group], after: Sequence[Message]) -> None:
    """Protected messages are the old ones, in order, by whole groups."""
    kept = [message for message in after if is_protected(message)]
    position = 0
    for group in old:
        mine = [message for message in group.messages if is_protected(message)]
        if not mine:
            continue
        if kept[position : position + len(mine)] == mine:
            if not _stands_in(group.messages, after):
                raise _rejected("a group with tools or provider data is kept whole or dropped whole (intact)")
            position += len(mine)
        elif group.open_calls:
            raise _rejected("a group whose calls wait for their results must stay (intact)")
    if position != len(kept):
        raise _rejected(
            "tool messages, and assistant messages with calls or provider data, may not be added, changed, "
            "reordered or kept in part (intact)"
        )


def _stands_in(part: Sequence[Message], whole: Sequence[Message]) -> bool:
    return any(
        list(whole[start : start + len(part)]) == list(part) for start in range(len(whole) - len(part) + 1)
    )


def _check_sources(before: Sequence[Message], after: Sequence[Message]) -> None:
    sources = iter([message for message in before if is_source(message)])
    for message in after:
        labelled = bool(message.extras) and SOURCE in (message.extras or {})
        if labelled and not any(message == source for source in sources):
            raise _rejected("a message of a source may be dropped, not changed or moved (provenance)")
    told = {message.text for message in before if is_source(message)}
    told -= {message.text for message in before if not is_source(message)}
    for message in after:
        if not is_source(message) and message.text in told:
            raise _rejected("a message of a source may not be relabelled or lose its label (provenance)")


def _check_last(old: Sequence[Group], new: Sequence[Group]) -> None:
    if not old:
        return
    last = old[-1]
    if not last.protected and not last.open_calls:
        # Nothing of it is protected, so a policy may say it in other words; a request needs something in its
        # end.
        return
    if not new or new[-1].messages[-len(last.messages) :] != last.messages:
        raise _rejected("the last group must stay (intact)")


def _broken(index: int, what: str) -> RetinueError:
    return RetinueError(f"the conversation is broken: messages[{index}] {what}", code="execution_failed")


def _rejected(why: str) -> RetinueError:
    return RetinueError(f"the projection of the conversation is rejected: {why}", code="execution_failed")
