"""Model clients: one module for each provider."""

from __future__ import annotations

import importlib.util

from retinue.errors import ValidationFailed
from retinue.models import ModelClient

__all__ = ["model_from_name"]

_KNOWN = '"extractive" (embedded, needs no network) or "openai:NAME" (any OpenAI-compatible server)'


def model_from_name(spec: str, base_url: str | None = None) -> ModelClient:
    """The model that a command line names: ``extractive``, or ``openai:NAME``.

    Args:
        spec: the name.
        base_url: of an OpenAI-compatible server, such as ``http://127.0.0.1:8080/v1``; for ``openai:`` only.

    Raises:
        ValidationFailed: an unknown name, a base URL that is none or not for this model, or no SDK.
    """
    provider, _, name = spec.strip().partition(":")
    if provider == "extractive" and not name:
        if base_url is not None:
            raise ValidationFailed(
                f"the embedded model talks to no server: leave the base URL {base_url} out, or use "
                '--model "openai:NAME"',
                path="base_url",
            )
        from retinue.providers.extractive import ExtractiveModel

        return ExtractiveModel()
    if provider == "openai":
        from retinue.providers.openai_chat import MISSING_SDK, OpenAIChatModel

        if not name:
            raise ValidationFailed('name the model after the colon, as in "openai:gpt-5-mini"', path="model")
        if importlib.util.find_spec("openai") is None:
            raise ValidationFailed(MISSING_SDK, path="model")
        return OpenAIChatModel(name, base_url=base_url)
    raise ValidationFailed(f"model {spec!r:.100} is not known; use {_KNOWN}", path="model")
