"""Decisions of completion policies: what can be said, and what cannot."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import CompletionDecision
from retinue.completion import COMPLETION_ACTIONS
from retinue.errors import ValidationFailed


@pytest.mark.parametrize("action", COMPLETION_ACTIONS)
def test_a_decision_has_an_action_a_reason_and_evidence(action: Any) -> None:
    instruction = "again" if action == "revise" else None
    decision = CompletionDecision(
        action=action, reason="so", instruction=instruction, evidence=["page 3", "page 4"]
    )
    assert decision.evidence == ("page 3", "page 4")


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"action": "maybe"}, "decision.action"),
        ({"action": None}, "decision.action"),
        ({"reason": ""}, "decision.reason"),
        ({"reason": " \n"}, "decision.reason"),
        ({"reason": None}, "decision.reason"),
        ({"reason": "\ud800"}, "decision.reason"),
        ({"instruction": "for nobody"}, "decision.instruction"),
        ({"action": "revise"}, "decision.instruction"),
        ({"action": "revise", "instruction": " "}, "decision.instruction"),
        ({"action": "revise", "instruction": 3}, "decision.instruction"),
        ({"action": "revise", "instruction": "\ud800"}, "decision.instruction"),
        ({"evidence": "one text"}, "decision.evidence"),
        ({"evidence": {"a": 1}}, "decision.evidence"),
        ({"evidence": None}, "decision.evidence"),
        ({"evidence": ["a", 2]}, "decision.evidence[1]"),
    ],
)
def test_a_decision_that_cannot_be_names_its_member(options: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationFailed) as failed:
        CompletionDecision(**{"action": "accept", "reason": "so", **options})
    assert failed.value.path == path


def test_evidence_does_not_change_with_its_list() -> None:
    evidence = ["a"]
    decision = CompletionDecision(action="accept", reason="so", evidence=evidence)
    evidence.append("b")
    assert decision.evidence == ("a",)
