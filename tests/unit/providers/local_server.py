"""llama.cpp's own server on loopback, in a process of its own: a real server that is none of ours.

    python -m tests.unit.providers.local_server FILE.gguf

It prints its address and serves until its standard input ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.unit.providers.chain_model import write_chain_model

SLOTS = 2
"""Requests that it works on at once."""
_CONTEXT = 4096
"""Tokens of each slot."""
_NEEDED = ("xllamacpp", "gguf")


def need_local_server() -> None:
    """Skip the test where the server's packages are not installed; in CI that is a failure."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    why = f"a local model server needs the packages {' and '.join(missing)}: pip install 'retinue[dev]'"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


@contextlib.contextmanager
def local_server(folder: Path) -> Iterator[str]:
    """The server's address, as in ``http://127.0.0.1:40000``, until the block ends."""
    file = folder / "chain.gguf"
    write_chain_model(file)
    with (folder / "server.log").open("w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = next((line for line in process.stdout if line.startswith("serving ")), "")
            assert address, (folder / "server.log").read_text()[-2_000:]
            yield address.split()[1]
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait(10)


class _Slot(msgspec.Struct):
    is_processing: bool


def busy_slots(address: str) -> int:
    """How many requests the server works on."""
    with urllib.request.urlopen(f"{address}/slots") as answer:
        return sum(slot.is_processing for slot in msgspec.json.decode(answer.read(), type=list[_Slot]))


def _serve(file: str) -> None:
    import xllamacpp  # type: ignore[import-untyped]

    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    parameters.n_ctx = SLOTS * _CONTEXT
    parameters.n_parallel = SLOTS
    server = xllamacpp.Server(parameters)
    print(f"serving {server.listening_address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1])
