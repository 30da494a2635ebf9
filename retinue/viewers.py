"""Reading a run's events page after page, wherever the run is."""

from __future__ import annotations

from retinue.client import PAGE, Located, SessionClient
from retinue.ended_runs import stored_events
from retinue.following import FeedViewer
from retinue.ids import Identity
from retinue.protocol import EventPageReply
from retinue.store import RunRecord


class RunViewer:
    """One viewer of one run. Belongs to the client loop; one page at a time is asked for.

    It follows the run from its host to the store, when that host died or the run left its memory: without a
    gap that no event names, and without a repeat, because its cursor goes on.
    """

    def __init__(
        self, client: SessionClient, identity: Identity, session_id: str, run_id: str, after: int
    ) -> None:
        self._client = client
        self._identity = identity
        self._session_id = session_id
        self._run_id = run_id
        self._after = after
        self._feed: FeedViewer | None = None

    async def page(self) -> EventPageReply:
        """The next events, waiting for one; empty and closed when there are no more.

        Raises:
            EventGap: they are kept nowhere.
            InputError: the cursor is ahead of the run.
        """
        page = await self._client.at_run(
            self._identity, self._session_id, self._run_id, self._follow, self._read
        )
        if page.events:
            self._after = page.events[-1][0]
        return page

    async def _follow(self, located: Located) -> EventPageReply:
        if located.feed is None:
            return await located.host.events(located.activation_id, self._run_id, self._after, PAGE)
        viewer = self._feed
        if viewer is None or viewer.feed is not located.feed or viewer.place[0] != located.activation_id:
            self.close()
            viewer = self._feed = located.feed.viewer(located.activation_id, self._run_id, self._after)
        try:
            return await viewer.page()
        except Exception:
            self._feed = None  # the next page is asked for anew, perhaps elsewhere
            raise

    async def _read(self, record: RunRecord) -> EventPageReply:
        self.close()
        return await stored_events(self._client.store, record, self._after, PAGE)

    def close(self) -> None:
        """Follow nothing any more."""
        viewer, self._feed = self._feed, None
        if viewer is not None:
            viewer.close()
