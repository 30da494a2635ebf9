"""What tests of applications use: a model with a script, and a conformance kit for each seam."""

from retinue.testing.scripted import Recorded, ScriptedModel, reply, tool_calls

__all__ = ["Recorded", "ScriptedModel", "reply", "tool_calls"]
