"""Teams: members and the coordinator that splits work among them. The driver is in team_driver.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from retinue.agents import Agent
from retinue.errors import ValidationFailed
from retinue.tools import check_kind


@dataclass(frozen=True, kw_only=True)
class Team:
    """Members and a coordinator (contract section 14).

    In mode ``coordinate`` one plan call gives a JSON list of ``{member_id, task}``, the members work, and one
    synthesis call answers.
    """

    name: str
    members: Sequence[Agent]
    coordinator: Agent
    """Makes the plan and the synthesis: of it, only the model, the instructions and the caps are used."""
    mode: Literal["coordinate"] = "coordinate"
    parallel: bool = False
    """Members at once instead of one after the other."""
    on_member_error: Literal["fail", "continue"] = "fail"
    """``fail`` ends the run at a member's error (in parallel: after all settled); ``continue`` tells the
    synthesis of it."""

    def __post_init__(self) -> None:
        check_kind("team.name", self.name, str)
        check_kind("team.coordinator", self.coordinator, Agent)
        check_kind("team.members", self.members, Sequence)
        for index, member in enumerate(self.members):
            check_kind(f"team.members[{index}]", member, Agent)
        object.__setattr__(self, "members", tuple(self.members))
        names = [member.name for member in self.members]
        if len(set(names)) != len(names):
            raise ValidationFailed(f"team {self.name}: two members share a name", path="team.members")
        if self.mode != "coordinate":
            raise ValidationFailed(f"team {self.name}: unknown mode {self.mode!r}", path="team.mode")
        if self.on_member_error not in ("fail", "continue"):
            raise ValidationFailed(
                f"team {self.name}: on_member_error is 'fail' or 'continue', not {self.on_member_error!r}",
                path="team.on_member_error",
            )
