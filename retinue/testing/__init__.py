"""What tests of applications use: a model with a script, and a conformance kit for each seam."""

from retinue.testing.driver_contract import DriverContractReport, DriverRuleBroken, check_driver_contract
from retinue.testing.scripted import Recorded, ScriptedModel, call_pieces, reply, stream, tool_calls

__all__ = [
    "DriverContractReport",
    "DriverRuleBroken",
    "Recorded",
    "ScriptedModel",
    "call_pieces",
    "check_driver_contract",
    "reply",
    "stream",
    "tool_calls",
]
