"""Token on, off and wrong are three clear outcomes, and none of them takes long or writes to the terminal."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from retinue.cluster.probe import Probe
from retinue.cluster.record import ClusterRecord
from retinue.errors import ClusterUnreachable
from tests.cluster.processes import clean_environment, run_program, running_head

TOKEN = "the-right-token-of-this-test-0123456789"
LIMIT = 15.0
"""Ray itself retries a refused token for 21 s."""

CONNECT = """
import json
from retinue.cluster.connection import connect
from retinue.errors import RetinueError
try:
    connection = connect({address!r})
except RetinueError as error:
    print(json.dumps(error.to_payload()))
else:
    import ray
    print(json.dumps({{"mode": connection.mode, "nodes": len(ray.nodes())}}))
    connection.close()
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRecord]:
    """A head that demands a token."""
    home = tmp_path_factory.mktemp("guarded")
    with running_head(clean_environment(home, {"RAY_AUTH_TOKEN": TOKEN})) as record:
        yield record


def refusal(address: str, environment: dict[str, str]) -> str:
    with pytest.raises(ClusterUnreachable) as caught:
        Probe(address, environment).answer()
    assert caught.value.data["address"] == address
    return caught.value.message


def test_the_right_token_is_let_in_though_the_mode_is_not_set(guarded: ClusterRecord, tmp_path: Path) -> None:
    answer = Probe(guarded.address, clean_environment(tmp_path, {"RAY_AUTH_TOKEN": TOKEN})).answer()
    assert answer.mode == "token"


def test_the_token_file_of_the_record_is_private_and_lets_in(guarded: ClusterRecord, tmp_path: Path) -> None:
    assert guarded.auth == "token"
    assert guarded.token_path is not None
    assert Path(guarded.token_path).stat().st_mode & 0o077 == 0
    environment = clean_environment(tmp_path, {"RAY_AUTH_TOKEN_PATH": guarded.token_path})
    assert Probe(guarded.address, environment).answer().mode == "token"


@pytest.mark.parametrize("mode", [{}, {"RAY_AUTH_MODE": "token"}])
def test_a_wrong_token_is_named_by_its_source(
    guarded: ClusterRecord, tmp_path: Path, mode: dict[str, str]
) -> None:
    message = refusal(guarded.address, clean_environment(tmp_path, {"RAY_AUTH_TOKEN": "wrong", **mode}))
    assert "refused the token from the variable RAY_AUTH_TOKEN" in message
    assert "wrong" not in message  # never the token itself


def test_a_missing_token_says_where_to_put_it(guarded: ClusterRecord, tmp_path: Path) -> None:
    message = refusal(guarded.address, clean_environment(tmp_path))
    assert "demands a token, and none was found" in message
    assert "RAY_AUTH_TOKEN" in message


def test_mode_disabled_is_told_apart(guarded: ClusterRecord, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path, {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": TOKEN})
    assert "RAY_AUTH_MODE is 'disabled' here" in refusal(guarded.address, environment)


def test_a_token_does_no_harm_where_none_is_demanded(unguarded: ClusterRecord, tmp_path: Path) -> None:
    assert unguarded.auth == "disabled"
    plain = Probe(unguarded.address, clean_environment(tmp_path)).answer()
    assert plain.mode == "disabled"
    unset = clean_environment(tmp_path, {"RAY_AUTH_TOKEN": "never sent"})
    assert Probe(unguarded.address, unset).answer().mode == "disabled"
    forced = clean_environment(tmp_path, {"RAY_AUTH_TOKEN": "not asked for", "RAY_AUTH_MODE": "token"})
    assert Probe(unguarded.address, forced).answer().mode == "token"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"RAY_AUTH_TOKEN": "wrong"}, "refused the token"),
        ({}, "none was found"),
        ({"RAY_AUTH_MODE": "token"}, "there is no token"),
        (
            {"RAY_AUTH_TOKEN_PATH": "/nonexistent/token"},
            "/nonexistent/token, which is empty or cannot be read",
        ),
    ],
    ids=["wrong", "missing", "mode-without-token", "no-such-file"],
)
def test_connect_raises_one_error_and_writes_nothing(
    guarded: ClusterRecord, tmp_path: Path, extra: dict[str, str], expected: str
) -> None:
    source = CONNECT.format(address=guarded.address)
    done = run_program(source, clean_environment(tmp_path, extra), limit=LIMIT)
    assert done.errors == ""
    payload = json.loads(done.output)
    assert payload["code"] == "cluster_unreachable"
    assert expected in payload["message"]
    assert guarded.address in payload["message"]


def test_connect_with_the_right_token_attaches(guarded: ClusterRecord, tmp_path: Path) -> None:
    source = CONNECT.format(address=guarded.address)
    done = run_program(source, clean_environment(tmp_path, {"RAY_AUTH_TOKEN": TOKEN}))
    assert json.loads(done.output) == {"mode": "standing", "nodes": 1}
    assert done.errors == ""


def test_connect_without_tokens_attaches(unguarded: ClusterRecord, tmp_path: Path) -> None:
    done = run_program(CONNECT.format(address=unguarded.address), clean_environment(tmp_path))
    assert json.loads(done.output) == {"mode": "standing", "nodes": 1}
    assert done.errors == ""


def test_an_address_where_nothing_listens(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        done = run_program(CONNECT.format(address=address), clean_environment(tmp_path), limit=LIMIT)
    assert done.errors == ""
    payload = json.loads(done.output)
    assert payload["code"] == "cluster_unreachable"
    assert f"{address} does not answer (Connection refused)" in payload["message"]
    assert "retinue up" in payload["message"]


def test_a_port_that_accepts_and_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        message = refusal(address, clean_environment(tmp_path))
    assert "did not answer as a Ray head within 2 s" in message


def test_where_the_address_came_from_is_said(tmp_path: Path) -> None:
    source = CONNECT.format(address=None)
    environment = clean_environment(tmp_path, {"RETINUE_ADDRESS": "127.0.0.1:1"})
    payload = json.loads(run_program(source, environment, limit=LIMIT).output)
    assert "127.0.0.1:1 (RETINUE_ADDRESS) does not answer" in payload["message"]
