"""A Ray of this process's own: started from any thread, used as it is, and gone with the process."""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.cluster.processes import clean_environment, run_program, start_program, wait_until_gone

WHOLE_LIFE = """
import json, os, signal, threading
import psutil
from retinue.cluster.connection import connect
from retinue.errors import ClusterUnreachable

def on_terminate(number, frame): ...
signal.signal(signal.SIGTERM, on_terminate)
before = dict(os.environ)

opened = []
thread = threading.Thread(target=lambda: opened.append(connect()))
thread.start(); thread.join()
first = opened[0]

import ray

@ray.remote(num_cpus=0)
class Echo:
    def say(self, word): return word

echo = Echo.remote()
said = ray.get(echo.say.remote("still here"), timeout=30)
again, local = connect(), connect("local")
again.close()
try:
    connect("192.0.2.77:6379")
except ClusterUnreachable as error:
    elsewhere = error.message
processes = [p.pid for p in psutil.Process().children(recursive=True)]
token = os.environ.get("RAY_AUTH_TOKEN", "")
still = ray.is_initialized()
first.close(); first.close()
print(json.dumps({
    "mode": first.mode, "started": first.started_here, "namespace": first.namespace, "said": said,
    "again": [again.address == first.address, again.started_here, again.mode],
    "local": [local.address == first.address, local.started_here],
    "elsewhere": elsewhere, "processes": processes, "token": len(token) > 30, "still": still,
    "handler": signal.getsignal(signal.SIGTERM) is on_terminate,
    "environment": [name for name in before.keys() ^ os.environ.keys() if "AUTH" in name],
    "closed": not ray.is_initialized(),
    "left": [p.pid for p in psutil.Process().children(recursive=True)],
}))
"""

STAYS = """
import json, os, sys, threading, time
import psutil
from retinue.cluster.connection import connect

thread = threading.Thread(target=connect)
thread.start(); thread.join()

import ray

@ray.remote(num_cpus=0)
class Sleeper:
    def ping(self): return os.getpid()
    def sleep(self): time.sleep(600)

sleeper = Sleeper.remote()
ray.get(sleeper.ping.remote())
print(json.dumps([p.pid for p in psutil.Process().children(recursive=True)]), flush=True)
ray.get(sleeper.sleep.remote())
"""

CONNECTING = """
print("connecting", flush=True)
from retinue.cluster.connection import connect
connect()
"""


def test_a_whole_life_begun_in_a_thread_that_ends(tmp_path: Path) -> None:
    done = run_program(WHOLE_LIFE, clean_environment(tmp_path))
    assert done.status == 0, done.errors
    assert done.errors == ""
    seen = json.loads(done.output)
    assert (seen["mode"], seen["started"], seen["namespace"]) == ("ephemeral", True, "retinue")
    assert seen["said"] == "still here", "Ray must outlive the thread that started it"
    assert seen["again"] == [True, False, "ephemeral"]
    assert seen["local"] == [True, False]
    assert seen["still"], "closing what did not open must not close"
    assert "Ray knows one cluster in a process" in seen["elsewhere"]
    assert seen["handler"], "the SIGTERM handler of the application must stay"
    assert seen["token"], "a local Ray listens on the network and must demand a token"
    assert seen["environment"] == []
    assert seen["closed"]
    assert seen["left"] == []
    assert len(seen["processes"]) >= 3
    assert wait_until_gone(seen["processes"]) == []
    assert not (tmp_path / ".ray").exists(), "no token may be left in a file that everybody can read"


def test_nothing_is_left_when_the_process_ends(tmp_path: Path) -> None:
    """Killed, terminated or interrupted. Side by side, because Ray's start and end are mostly waiting."""
    numbers = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    with ExitStack() as stack:
        programs = [
            stack.enter_context(start_program(STAYS, clean_environment(tmp_path / number.name)))
            for number in numbers
        ]
        for program in programs:
            stack.callback(program.kill)  # where the test fails: leaving would wait for it
        ended = {}
        for number, program in zip(numbers, programs, strict=True):
            assert program.stdout is not None
            processes = json.loads(program.stdout.readline())
            assert len(processes) >= 3
            program.send_signal(number)
            _, errors = program.communicate(timeout=60)
            ended[number] = (program.returncode, errors, processes)
        for number, (_, _, processes) in ended.items():
            assert wait_until_gone(processes) == [], number
    for number in (signal.SIGKILL, signal.SIGTERM):
        assert ended[number][:2] == (-number, ""), "no native stack may be printed"
    assert "KeyboardInterrupt" in ended[signal.SIGINT][1]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_an_interrupt_while_ray_starts_leaves_nothing(tmp_path: Path) -> None:
    with start_program(CONNECTING, clean_environment(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connecting\n"
        started: list[psutil.Process] = []
        deadline = time.monotonic() + 30
        while not any(child.name() == "gcs_server" for child in started) and time.monotonic() < deadline:
            started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert started, "Ray must have been starting"
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert wait_until_gone([child.pid for child in started]) == []
