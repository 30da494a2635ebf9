"""What tests of applications use: a model with a script, and a conformance kit for each seam."""

from retinue.testing.driver_contract import DriverContractReport, DriverRuleBroken, check_driver_contract
from retinue.testing.model_contract import (
    ModelContractBroken,
    ModelContractReport,
    check_model_contract,
)
from retinue.testing.scripted import Recorded, ScriptedModel, call_pieces, reply, stream, tool_calls

__all__ = [
    "DriverContractReport",
    "DriverRuleBroken",
    "ModelContractBroken",
    "ModelContractReport",
    "Recorded",
    "ScriptedModel",
    "call_pieces",
    "check_driver_contract",
    "check_model_contract",
    "reply",
    "stream",
    "tool_calls",
]
