"""Where ``connect()`` goes, before it goes there."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from retinue.cluster import connection
from retinue.cluster.connection import _find_target, _Keeper
from retinue.cluster.probe import check_address
from retinue.cluster.record import ClusterRecord, write_record
from retinue.errors import ClusterUnreachable

RECORDED = "10.1.2.3:6379"


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETINUE_HOME", str(tmp_path))
    monkeypatch.delenv("RETINUE_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def recorded() -> ClusterRecord:
    record = ClusterRecord(
        address=RECORDED, namespace="retinue", host=socket.gethostname(), since=time.time(), auth="token"
    )
    write_record(record)
    return record


def test_the_order_of_addresses(monkeypatch: pytest.MonkeyPatch, recorded: ClusterRecord) -> None:
    assert _find_target(None, True).address == RECORDED
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:1")
    assert _find_target(None, True).address == "10.0.0.3:1"
    monkeypatch.setenv("RETINUE_ADDRESS", "10.0.0.2:1")
    found = _find_target(None, True)
    assert (found.address, found.hint) == ("10.0.0.2:1", " (RETINUE_ADDRESS)")
    assert _find_target("10.0.0.1:1", True).address == "10.0.0.1:1"
    assert _find_target("local", True).address is None


def test_the_standing_cluster_is_known_by_its_address_too(recorded: ClusterRecord) -> None:
    assert _find_target(RECORDED, True).environment == recorded.environment()
    assert _find_target("auto", True).environment == recorded.environment()
    assert _find_target("10.0.0.1:1", True).environment == {}


def test_without_any_cluster_it_starts_one_or_says_so() -> None:
    assert _find_target(None, True).address is None
    with pytest.raises(ClusterUnreachable, match="retinue up"):
        _find_target(None, False)


def test_a_dead_standing_cluster_does_not_count(recorded: ClusterRecord) -> None:
    write_record(
        ClusterRecord(
            address=RECORDED,
            namespace="retinue",
            host=socket.gethostname(),
            since=0.0,
            pid=2**22 - 1,
            pid_started=1.0,
        )
    )
    assert _find_target(None, True).address is None


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "head.internal:1", "localhost:65535", "[::1]:6379"])
def test_addresses_of_heads(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("10.0.0.1", "write host:port"),
        ("10.0.0.1:0", "write host:port"),
        ("10.0.0.1:65536", "write host:port"),
        ("http://10.0.0.1:8265", "write host:port"),
        ("", "write host:port"),
        ("ray://10.0.0.1:10001", "Ray Client, which Retinue does not use"),
    ],
)
def test_what_is_no_address_of_a_head(address: str, why: str) -> None:
    with pytest.raises(ClusterUnreachable) as caught:
        check_address(address, " (RETINUE_ADDRESS)")
    assert why in caught.value.message
    assert "RETINUE_ADDRESS" in caught.value.message
    assert caught.value.data["address"] == address


def test_the_keepers_thread_stays_when_its_caller_ends() -> None:
    keeper = _Keeper()
    seen: list[threading.Thread] = []
    caller = threading.Thread(target=lambda: keeper.run(lambda: seen.append(threading.current_thread())))
    caller.start()
    caller.join()
    keeper.run(lambda: seen.append(threading.current_thread()))
    assert seen[0] is seen[1]
    assert seen[0].is_alive()
    assert seen[0].daemon


def test_the_keeper_passes_errors_on_and_does_not_undo_what_failed() -> None:
    keeper = _Keeper()
    undone: list[bool] = []

    def fail() -> None:
        raise ValueError("as expected")

    with pytest.raises(ValueError, match="as expected"):
        keeper.run(fail, undo=lambda: undone.append(True))
    assert not undone


def test_an_interrupted_wait_lets_the_work_finish_and_undoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = _Keeper()
    order: list[str] = []
    go_on = threading.Event()

    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            if not order and not go_on.is_set():
                go_on.set()
                raise KeyboardInterrupt
            super().result(timeout)

    def work() -> None:
        assert go_on.wait(10)
        order.append("done")

    monkeypatch.setattr(connection, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        keeper.run(work, undo=lambda: order.append("undone"))
    assert order == ["done", "undone"]


def test_connecting_is_quiet_about_ray_until_it_is_needed() -> None:
    program = "import sys, retinue.cluster.connection, retinue.cluster.standing; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
