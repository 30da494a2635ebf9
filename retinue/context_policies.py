"""Context policies: what of a conversation a model is sent (contract section 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, get_args, runtime_checkable

from retinue.errors import ValidationFailed
from retinue.grouping import Grouping
from retinue.messages import Message

if TYPE_CHECKING:
    from retinue.policy_context import PolicyContext


def grouping_of(policy: ContextPolicy) -> Grouping:
    """The grouping that a policy declares.

    Raises:
        ValidationFailed: it is none.
    """
    grouping: object = getattr(policy, "grouping", None) or "user_turn"
    if grouping not in get_args(Grouping):
        raise ValidationFailed(
            f"a context policy groups by {' or '.join(get_args(Grouping))}, not {grouping!r:.80}",
            path="context_policy.grouping",
        )
    return cast(Grouping, grouping)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What became of one source of a request."""

    source_id: str
    included: bool
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What a model is to be sent."""

    messages: Sequence[Message]
    provenance: Sequence[Provenance]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a policy projects: copies, so that changing them changes no history."""

    history: Sequence[Message]
    """The request's messages, system messages included."""
    entries: Sequence[Message] = ()
    """Those of them that came from context sources."""
    role: str = "main"
    """Model role of the call."""
    model_id: str = ""
    """The model that is about to be asked, for estimates."""


@runtime_checkable
class ContextPolicy(Protocol):
    """Projects the conversation of each task model call, at the root of its run.

    It may have a ``grouping``: ``"user_turn"`` (the default) or ``"tool_roundtrip"``. What it may change is
    in :func:`retinue.grouping.check_projection`; history is never changed by it.
    """

    @property
    def id(self) -> str: ...

    async def project(self, conversation: Conversation, ctx: PolicyContext) -> Projection: ...
