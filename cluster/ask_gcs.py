"""Asks a Ray head one question and prints the answer as JSON. A script: it runs in a process of its own.

In a process of its own because Ray, asked for an address that does not answer or refuses the token,
retries for 20 to 60 seconds, writes to the terminal, and in one case ends the process. Here that costs
nothing: the clock below ends it, and what it writes is not shown.

Usage: ``python ask_gcs.py HOST:PORT SECONDS MODES``. It tries the modes, ``disabled`` and ``token``, in the
order given, and takes the token from where Ray does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from importlib import import_module
from typing import Any, NoReturn


def main() -> None:
    address, seconds, modes = sys.argv[1], float(sys.argv[2]), sys.argv[3].split(",")

    raylet: Any = import_module("ray._raylet")  # its type stubs leave out what is needed here
    from ray._common.usage import usage_lib
    from ray._private import services, utils
    from ray.exceptions import AuthenticationError

    resolved = str(services.canonicalize_bootstrap_address(address))
    host, _, port = resolved.rpartition(":")
    clock = threading.Timer(seconds, lambda: answer(outcome="silent", resolved=resolved))
    clock.daemon = True
    clock.start()  # importing Ray is not the head's fault and does not count

    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        answer(outcome="unreachable", resolved=resolved, error=error.strerror or str(error))

    for mode in modes:
        os.environ["RAY_AUTH_MODE"] = mode
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        try:
            client = raylet.GcsClient(address=resolved)
            metadata = usage_lib.get_cluster_metadata(client)
        except AuthenticationError:
            continue
        except Exception as error:
            answer(outcome="failed", resolved=resolved, error=f"{type(error).__name__}: {error}")
        try:
            if metadata:
                utils.check_version_info(metadata, "this machine")
        except Exception:
            theirs = f"Ray {metadata['ray_version']} on Python {metadata['python_version']}"
            answer(outcome="version", resolved=resolved, error=theirs)
        answer(outcome="answers", resolved=resolved, mode=mode)
    answer(outcome="refused", resolved=resolved, mode=modes[-1])


def answer(**values: str) -> NoReturn:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of Ray may be in the middle of a retry


if __name__ == "__main__":
    main()
