"""Grants: the upper bound of what a run may call (contract section 7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from retinue.errors import InputError, ValidationFailed

MAIN_ROLE = "main"
"""The model role of task calls; the only one that may fall back to an agent's own model."""


@dataclass(frozen=True, kw_only=True)
class Grants:
    """What a run may use. Starts may narrow, never widen.

    ``Grants(tool_ids=["lookup"], model_roles=["main"])``.
    """

    tool_ids: Sequence[str] = ()
    """Tools (and effects) that may be dispatched, by name."""
    model_roles: Sequence[str] = (MAIN_ROLE,)
    """Model roles that may be called."""
    required_tool_ids: Sequence[str] = ()
    """Tools without which a run must not start; a subset of ``tool_ids``."""

    def __post_init__(self) -> None:
        for name in ("tool_ids", "model_roles", "required_tool_ids"):
            given = getattr(self, name)
            values = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
            if not all(isinstance(value, str) and value for value in values):
                raise ValidationFailed(
                    f"grants.{name} must be a list of nonempty strings", path=f"grants.{name}"
                )
            if len(set(values)) != len(values):
                raise ValidationFailed(f"grants.{name} names something twice", path=f"grants.{name}")
            object.__setattr__(self, name, values)

    def narrowed(self, wanted: Grants | None) -> Grants:
        """These grants narrowed to ``wanted``; the required tools of both.

        Raises:
            InputError: ``wanted`` has something that is not granted here, or a required tool is missing.
        """
        if wanted is None:
            result = self
        else:
            for name in ("tool_ids", "model_roles"):
                extra = sorted(set(getattr(wanted, name)) - set(getattr(self, name)))
                if extra:
                    raise InputError(
                        f"grants.{name} asks for {', '.join(extra)}, which the runtime does not grant; "
                        "a start may only narrow",
                        field=f"grants.{name}",
                    )
            required = dict.fromkeys((*self.required_tool_ids, *wanted.required_tool_ids))
            result = Grants(
                tool_ids=wanted.tool_ids, model_roles=wanted.model_roles, required_tool_ids=tuple(required)
            )
        missing = sorted(set(result.required_tool_ids) - set(result.tool_ids))
        if missing:
            raise InputError(
                f"required tool {', '.join(missing)} is not among the granted tools", field="grants"
            )
        return result
