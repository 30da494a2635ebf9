"""How actors talk, as far as it shows without Ray."""

from __future__ import annotations

import pytest
import ray

from retinue.actors.wire import call
from retinue.errors import ClusterUnreachable


async def test_a_call_without_a_connection_starts_no_cluster() -> None:
    """Ray would: whoever still follows a run when its cluster was shut down must not."""

    @ray.remote
    class Actor:
        async def method(self) -> None: ...

    with pytest.raises(ClusterUnreachable, match="no longer connected"):
        await call(Actor.remote)  # type: ignore[attr-defined]  # what ray.remote adds
    assert not ray.is_initialized()
