"""Whether a Ray head answers at an address and lets this client in: known in two seconds, without noise."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from retinue.cluster.authentication import MODE, how_to_give_a_token, token_source
from retinue.errors import ClusterUnreachable

ANSWER_SECONDS = 2.0
"""How long a head may take to answer."""
_START_SECONDS = 30.0
"""How long the asking process may take in all: importing Ray is slow on a busy machine."""
_ADDRESS = re.compile(r"^(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})$")


@dataclass(frozen=True)
class Answer:
    """What a head said that answers and lets this client in."""

    address: str
    """``host:port`` as Ray names it: localhost is replaced by this machine's address."""
    mode: str
    """``token`` or ``disabled``: the mode with which this client is let in."""


class Probe:
    """One question to one head, asked in a process of its own.

    Asking begins with the constructor, so that the caller can import Ray meanwhile; :meth:`answer` waits.
    """

    def __init__(
        self,
        address: str,
        environ: Mapping[str, str] | None = None,
        *,
        hint: str = "",
        seconds: float | None = None,
    ) -> None:
        """
        Args:
            address: ``host:port`` of the head.
            environ: what mode and token are taken from; this process's environment when left out.
            hint: where the address came from, for the error message (``" (RAY_ADDRESS)"``).
            seconds: how long the head may take; :data:`ANSWER_SECONDS` when left out.

        Raises:
            ClusterUnreachable: the address is not one, or mode ``token`` is set and there is no token.
        """
        self.address = check_address(address, hint)
        self._environ = dict(os.environ if environ is None else environ)
        self._hint = hint
        self._seconds = ANSWER_SECONDS if seconds is None else seconds
        mode = self._environ.get(MODE, "").lower()
        if mode == "token" and token_source(self._environ) is None:
            # Ray would end the process over this.
            raise ClusterUnreachable(
                f"{MODE} is 'token', but there is no token for the Ray cluster at {address}{hint}: "
                f"{how_to_give_a_token(self._environ)}",
                address=address,
            )
        # Where the mode is not set, a token is sent only to a head that demands one.
        modes = mode or ("disabled" if token_source(self._environ) is None else "disabled,token")
        script = Path(__file__).with_name("ask_gcs.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), address, str(self._seconds), modes],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the caller
        )

    def answer(self) -> Answer:
        """Wait for the answer.

        Raises:
            ClusterUnreachable: nothing answers, what answers is no Ray head, it refuses the token, or it
                runs other versions of Ray or Python.
        """
        try:
            output, _ = self._process.communicate(timeout=_START_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._error(
                f"could not be asked within {_START_SECONDS:.0f} s: is this machine very busy?"
            ) from None
        finally:
            self.close()
        lines = output.strip().splitlines()
        if not lines:
            raise self._error(
                f"could not be asked (the asking process ended with {self._process.returncode})"
            )
        said = json.loads(lines[-1])
        if said["outcome"] == "answers":
            return Answer(address=said["resolved"], mode=said["mode"])
        raise self._refusal(said)

    def close(self) -> None:
        """End the asking process, if it is still there."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _refusal(self, said: dict[str, str]) -> ClusterUnreachable:
        outcome = said["outcome"]
        if outcome == "unreachable":
            return self._error(
                f"does not answer ({said['error']}); is it up? `retinue up` starts one on this machine"
            )
        if outcome == "silent":
            return self._error(
                f"accepted the connection but did not answer as a Ray head within {self._seconds:g} s; "
                "is this the port of its GCS (6379 by default, not the dashboard's 8265)?"
            )
        if outcome == "version":
            ours = f"Ray {version('ray')} on Python {platform.python_version()}"
            return self._error(f"runs {said['error']}, and this process {ours}; both must be the same")
        if outcome == "refused":
            return self._error(self._refused_token(said["mode"]))
        return self._error(f"could not be asked: {said.get('error', outcome)}")

    def _refused_token(self, mode: str) -> str:
        source = token_source(self._environ)
        if mode == "token":
            return f"refused the token from {source}; give it the token that the cluster was started with"
        if MODE in self._environ:
            return f"demands a token, but {MODE} is {self._environ[MODE]!r} here; set it to 'token'"
        return f"demands a token, and none was found: {how_to_give_a_token(self._environ)}"

    def _error(self, what: str) -> ClusterUnreachable:
        return ClusterUnreachable(
            f"the Ray cluster at {self.address}{self._hint} {what}", address=self.address
        )


def check_address(address: str, hint: str = "") -> str:
    """The address, if it has the form ``host:port``.

    Raises:
        ClusterUnreachable: it has another form.
    """
    if address.startswith("ray://"):
        raise ClusterUnreachable(
            f"{address}{hint} is an address of Ray Client, which Retinue does not use: run on a machine of "
            "the cluster and give its GCS address, host:port (6379 by default)",
            address=address,
        )
    match = _ADDRESS.match(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ClusterUnreachable(
            f"{address!r}{hint} is no address of a Ray cluster: write host:port, 'auto' for a cluster on "
            "this machine, or 'local' for one that lives as long as this process",
            address=address,
        )
    return address
