"""A head for the tests that need just any."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from retinue.cluster.record import ClusterRecord
from tests.cluster.processes import clean_environment, running_head

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts what it runs in the background so; programs that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRecord]:
    """A head that demands no token. Tests may deploy to it, and must leave it as it was."""
    home = tmp_path_factory.mktemp("unguarded")
    with running_head(clean_environment(home, {"RAY_AUTH_MODE": "disabled"})) as record:
        yield record
