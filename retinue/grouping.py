"""Groups of a conversation, and what a projection of it may change (contract section 9).

A group is what is kept or dropped as one: a user message up to the next one, with all its rounds of tools.
Under the grouping ``tool_roundtrip`` a group also ends with the last result of a round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from retinue.errors import RetinueError
from retinue.messages import Message, ToolPairing

Grouping = Literal["user_turn", "tool_roundtrip"]
SOURCE = "source"
"""Key of ``Message.extras`` under which a message from a context source says where it is from:
``{"source": {"id": ..., ...}}``. Such extras are the runtime's own, and no data of a provider."""


@dataclass
class Group:
    """Messages that belong together."""

    messages: list[Message] = field(default_factory=list)

    @property
    def protected(self) -> bool:
        """It is kept whole or dropped whole."""
        return any(is_protected(message) for message in self.messages)


def is_labelled(message: Message) -> bool:
    """It says that it came from a context source."""
    return SOURCE in (message.extras or {})


def is_source(message: Message) -> bool:
    """It came from a context source, and carries nothing else that is opaque."""
    return set(message.extras or ()) == {SOURCE}


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
    pairing = ToolPairing()
    seen: set[str] = set()
    closed = True
    for index, message in enumerate(messages):
        try:
            pairing.add(message)
        except ValueError as error:
            raise _broken(index, str(error)) from None
        if message.role == "system":
            continue
        if message.role == "tool":
            groups[-1].messages.append(message)
            closed = grouping == "tool_roundtrip" and not pairing.open_calls
            continue
        ids = {call.id for call in message.tool_calls}
        if repeated := sorted(seen & ids):
            raise _broken(index, f"has a repeated call id: {repeated}")
        seen |= ids
        if closed or message.role == "user":
            groups.append(Group())
        closed = False
        groups[-1].messages.append(message)
    return groups


def check_projection(
    before: Sequence[Message], after: Sequence[Message], grouping: Grouping = "user_turn"
) -> None:
    """Raise ``RetinueError`` unless ``after`` is a projection of ``before`` that a model may be sent.

    * System messages stay as they are, in their order; where they stand among the others is free.
    * A group with tools or provider data is kept whole or dropped whole, and none is added. Where the last
      group is one, it stays; a group whose calls wait for their results is always the last.
    * A message of a source may be dropped, but neither changed nor called something else, nor lose its label.
    * What stays keeps its order.

    Other messages may be dropped, changed and added: what a user asked may so be said without the rounds of
    tools that came of it.
    """
    groups = grouped(before, grouping)
    grouped(after, grouping)
    _check_sources(before, after)
    _check_system(before, after)
    spoken = [message for message in after if message.role != "system"]
    _check_protected(groups, spoken)
    _check_order([message for message in before if message.role != "system"], spoken)


def _check_system(before: Sequence[Message], after: Sequence[Message]) -> None:
    told = [_form(message) for message in before if message.role == "system"]
    if told != [_form(message) for message in after if message.role == "system"]:
        raise _rejected("system messages must stay as they are, in their order (system)")


def _check_sources(before: Sequence[Message], after: Sequence[Message]) -> None:
    sources = iter([_form(message) for message in before if is_labelled(message)])
    for message in after:
        if is_labelled(message) and _form(message) not in sources:  # goes on behind the one that it finds
            raise _rejected("a message of a source may be dropped, not changed, moved or added (provenance)")
    contents = {_content(message) for message in before if is_labelled(message) and message.content}
    contents -= {_content(message) for message in before if not is_labelled(message)}
    if any(not is_labelled(message) and _content(message) in contents for message in after):
        raise _rejected("a message of a source may not be relabelled or lose its label (provenance)")


def _check_protected(groups: Sequence[Group], after: Sequence[Message]) -> None:
    """Protected messages stand in ``after`` by whole groups, in order, and the last group is among them.

    Walks through all ways to read ``after`` as some of the groups with unprotected messages between them:
    groups may begin alike, so that the first that fits need not be the right one.
    """
    whole = [[_form(message) for message in group.messages] for group in groups if group.protected]
    starts: dict[bytes, list[int]] = {}
    for number, forms in enumerate(whole):
        starts.setdefault(forms[0], []).append(number)
    forms = [_form(message) for message in after]
    free = [not is_protected(message) for message in after]
    must_end = bool(groups) and groups[-1].protected
    used: list[int | None] = [0] + [None] * len(forms)
    """By the number of messages read: how many groups lie behind, at least; ``None`` where no way leads."""
    ended = False
    for index, form in enumerate(forms):
        behind = used[index]
        if behind is None:
            continue
        if free[index]:
            used[index + 1] = _least(used[index + 1], behind)
        for number in starts.get(form, ()):
            end = index + len(whole[number])
            if number >= behind and forms[index:end] == whole[number]:
                used[end] = _least(used[end], number + 1)
                ended = ended or (number == len(whole) - 1 and all(free[end:]))
    if used[-1] is None:
        raise _rejected(
            "tool messages, and assistant messages with calls or provider data, may not be added, changed or "
            "reordered, and their group is kept whole or dropped whole (intact)"
        )
    if must_end and not ended:
        raise _rejected("the last group must stay (intact)")


def _check_order(before: Sequence[Message], after: Sequence[Message]) -> None:
    """Messages that are the only ones of their kind, so that it can be told, stand in their order."""
    places = _places(before)
    kept = [places[form] for form in _places(after) if form in places]
    if kept != sorted(kept):
        raise _rejected("what stays of the conversation must keep its order (order)")


def _places(messages: Sequence[Message]) -> dict[bytes, int]:
    forms = [_form(message) for message in messages]
    counted = Counter(forms)
    return {form: index for index, form in enumerate(forms) if counted[form] == 1}


def _least(known: int | None, found: int) -> int:
    return found if known is None else min(known, found)


def _form(message: Message) -> bytes:
    """What two messages have in common that are the same; ``==`` takes ``True`` for ``1``."""
    return msgspec.json.encode(message, order="deterministic")


def _content(message: Message) -> bytes:
    return msgspec.json.encode(message.content)


def _broken(index: int, what: str) -> RetinueError:
    return RetinueError(f"the conversation is broken: messages[{index}] {what}", code="execution_failed")


def _rejected(why: str) -> RetinueError:
    return RetinueError(f"the projection of the conversation is rejected: {why}", code="execution_failed")
