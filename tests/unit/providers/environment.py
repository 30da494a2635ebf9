"""The environment variables that provider SDKs read, as tests set them."""

from __future__ import annotations

import pytest

KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
ELSEWHERE = (
    "OPENAI_BASE_URL",
    "ANTHROPIC_BASE_URL",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
)
"""What would send a request to another server than the test's."""


def only_this_server(monkeypatch: pytest.MonkeyPatch, key: str = "sk-test") -> None:
    """Give every SDK a key, and no server but the one that a test names."""
    for name in KEYS:
        monkeypatch.setenv(name, key)
    for name in ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
