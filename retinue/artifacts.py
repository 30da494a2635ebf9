"""Artifacts of a session while a run has it: kept at once, whatever becomes of the run."""

from __future__ import annotations

from dataclasses import dataclass

from retinue.errors import InputError
from retinue.ids import check_id, new_id
from retinue.store import Lease, Store, StoredArtifact
from retinue.store_wait import until_stored


@dataclass(frozen=True)
class SessionArtifacts:
    """The artifacts of one session, written under its lease."""

    store: Store
    lease: Lease

    async def put(self, artifact: StoredArtifact) -> None:
        """Keep it; an id that stands already is left alone. Raises :class:`LeaseLost` and the like."""
        await until_stored(lambda: self.store.put_artifacts(self.lease, [artifact]))

    async def get(self, artifact_id: str) -> StoredArtifact | None:
        """An artifact of this session."""
        return await until_stored(lambda: self.store.read_artifact(self.lease.address, artifact_id))


MAX_ARTIFACT_BYTES = 16 * 1024 * 1024
"""Largest artifact that a driver or a tool may keep: it travels in one message and is stored as one value."""


def check_artifact(data: object, mime_type: object, artifact_id: object) -> StoredArtifact:
    """What a driver or a tool wants kept, as it is stored; text becomes UTF-8.

    Raises:
        InputError: neither bytes nor text, text that UTF-8 cannot carry, more than
            :data:`MAX_ARTIFACT_BYTES`, or a bad id or type.
    """
    check_id("mime_type", mime_type)
    chosen = new_id("artifact") if artifact_id is None else artifact_id
    check_id("artifact_id", chosen)
    if not isinstance(data, bytes | str):
        raise InputError(f"an artifact must be bytes or str, not {type(data).__name__}", field="data")
    if len(data) <= MAX_ARTIFACT_BYTES:
        try:
            body = data.encode() if isinstance(data, str) else data
        except UnicodeEncodeError:
            raise InputError(
                f"artifact {chosen!r} holds a lone surrogate, which no store can carry; give bytes",
                field="data",
            ) from None
        if len(body) <= MAX_ARTIFACT_BYTES:
            return StoredArtifact(artifact_id=str(chosen), mime_type=str(mime_type), data=body)
    raise InputError(
        f"artifact {chosen!r} is larger than the {MAX_ARTIFACT_BYTES} bytes that can be kept; keep it "
        "elsewhere, and its address here",
        field="data",
    )
