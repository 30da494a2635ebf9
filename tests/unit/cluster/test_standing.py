"""What ``up`` and ``down`` do when something on the way fails. The cluster itself is played."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from retinue.cluster import standing
from retinue.cluster.connection import Connection
from retinue.cluster.record import ClusterRecord, read_record, write_record
from retinue.errors import ClusterUnreachable, VersionMismatch

ADDRESS = "10.1.2.3:6379"


class PlayedCluster:
    """Heads that start and stop at once, actors that stand or do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened: list[str] = []
        self.fault: Exception | None = None
        monkeypatch.setattr(standing, "start_head", self.start_head)
        monkeypatch.setattr(standing, "stop_head", self.stop_head)
        monkeypatch.setattr(standing, "_connected", self.connected)
        monkeypatch.setattr(standing, "_deploy", lambda *_: self.act("deploy"))
        monkeypatch.setattr(standing, "_withdraw", self.withdraw)

    def act(self, what: str) -> None:
        self.happened.append(what)
        if self.fault is not None:
            raise self.fault

    def withdraw(self, _: str) -> list[str]:
        self.act("withdraw")
        return ["a/b/c"]

    def start_head(self, *, namespace: str, num_cpus: int | None) -> ClusterRecord:
        self.happened.append("start head")
        return record(namespace=namespace)

    def stop_head(self, _: ClusterRecord) -> int:
        self.happened.append("stop head")
        return 5

    @contextmanager
    def connected(self, address: str, namespace: str) -> Iterator[Connection]:
        yield Connection(
            address=address, mode="standing", namespace=namespace, started_here=False, node_id="n"
        )


def record(*, namespace: str = "retinue", mine: bool = True) -> ClusterRecord:
    return ClusterRecord(
        address=ADDRESS,
        namespace=namespace,
        host=socket.gethostname(),
        since=time.time(),
        pid=os.getpid() if mine else None,
        pid_started=psutil.Process().create_time() if mine else None,
    )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PlayedCluster:
    monkeypatch.setenv("RETINUE_HOME", str(tmp_path))
    monkeypatch.delenv("RETINUE_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return PlayedCluster(monkeypatch)


def test_up_starts_once(cluster: PlayedCluster) -> None:
    first = standing.up()
    assert (first.started, first.already) == (True, False)
    assert read_record() == first.record
    again = standing.up()
    assert (again.started, again.already, again.record) == (False, True, first.record)
    assert cluster.happened == ["start head", "deploy", "deploy"]


def test_a_head_without_the_runtime_does_not_stay(cluster: PlayedCluster) -> None:
    cluster.fault = ClusterUnreachable("the registry does not come to life")
    with pytest.raises(ClusterUnreachable, match="registry"):
        standing.up()
    assert cluster.happened == ["start head", "deploy", "stop head"]
    assert read_record() is None


def test_a_cluster_that_was_given_is_recorded_only_when_the_runtime_stands(cluster: PlayedCluster) -> None:
    cluster.fault = VersionMismatch("the cluster runs protocol 2")
    with pytest.raises(VersionMismatch):
        standing.up(ADDRESS)
    assert read_record() is None
    cluster.fault = None
    report = standing.up(ADDRESS)
    assert not report.started
    assert not report.record.started_here
    assert read_record() == report.record


def test_up_does_not_change_what_stands(cluster: PlayedCluster) -> None:
    write_record(record())
    with pytest.raises(ClusterUnreachable, match=r"namespace 'retinue', not 'other'.*retinue down"):
        standing.up(namespace="other")
    with pytest.raises(ClusterUnreachable, match=r"another cluster is up, at 10\.1\.2\.3:6379"):
        standing.up("10.9.9.9:6379")
    with pytest.raises(ClusterUnreachable, match="leave the address out"):
        standing.up("local")
    assert cluster.happened == []


def test_a_record_of_a_dead_head_is_replaced(cluster: PlayedCluster) -> None:
    write_record(replace(record(), pid_started=1.0))
    assert standing.up().started
    assert cluster.happened == ["stop head", "start head", "deploy"]


def test_down_stops_its_own_head_even_if_the_actors_do_not_answer(cluster: PlayedCluster) -> None:
    write_record(record())
    cluster.fault = ClusterUnreachable("the actors do not answer")
    report = standing.down()
    assert (report.trouble, report.processes, report.left_running) == ("the actors do not answer", 5, False)
    assert cluster.happened == ["withdraw", "stop head"]
    assert read_record() is None


def test_down_keeps_the_record_of_a_given_cluster_that_does_not_answer(cluster: PlayedCluster) -> None:
    attached = record(mine=False)
    write_record(attached)
    cluster.fault = ClusterUnreachable("the actors do not answer")
    with pytest.raises(ClusterUnreachable):
        standing.down()
    assert read_record() == attached
    assert cluster.happened == ["withdraw"]


def test_down_reports_the_sessions_that_were_released(cluster: PlayedCluster) -> None:
    write_record(record())
    report = standing.down()
    assert (report.address, report.sessions, report.trouble) == (ADDRESS, ("a/b/c",), None)
    assert standing.down().address is None


def test_a_cluster_of_another_machine_is_not_touched(cluster: PlayedCluster) -> None:
    elsewhere = replace(record(), host="elsewhere")
    write_record(elsewhere)
    with pytest.raises(ClusterUnreachable, match="run `retinue down` there"):
        standing.down()
    with pytest.raises(ClusterUnreachable, match="brought up on elsewhere"):
        standing.up()
    assert standing.status().trouble == "it was brought up on elsewhere"
    assert read_record() == elsewhere
    assert cluster.happened == []


def test_status_of_a_dead_head_says_so(cluster: PlayedCluster) -> None:
    write_record(replace(record(), pid_started=1.0))
    report = standing.status()
    assert not report.up
    assert report.trouble is not None
    assert "has ended; `retinue up` starts another" in report.trouble
