"""Drivers that ask for approvals, at module level so that other processes can import them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from retinue import Approvals, DriverOutput, ExecutionServices, Grants, RunRequest, RuntimeConfig
from retinue.errors import ToolFailed
from retinue.events import Custom
from retinue.messages import content_text
from tests.ray.drivers import Driver


@dataclass(frozen=True)
class Pays(Driver):
    """Says where it runs, pays its input, and answers with what became of that."""

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.emit(Custom("pid", os.getpid()))

        async def pay(arguments: dict[str, Any]) -> str:
            return f"paid {arguments['amount']}"

        try:
            amount = content_text(request.input)
            return DriverOutput(text=await services.dispatch_effect("pay", {"amount": amount}, pay))
        except ToolFailed as error:
            return DriverOutput(text=error.message)


def paying_app() -> RuntimeConfig:
    """An app by name: everything must be approved."""
    return RuntimeConfig(
        driver=Pays(),
        grants=Grants(tool_ids=["pay"]),
        approvals=Approvals(require="all"),
        name="paying",
    )
