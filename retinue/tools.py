"""Tools: functions that a model may call, with a schema from their type hints and docstring."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints, overload

import msgspec

from retinue.errors import ValidationFailed
from retinue.models import ToolSchema
from retinue.policies import DenialKind, Effect
from retinue.tool_context import ToolContext
from retinue.tool_options import MAX_RESULT_BYTES, ApprovalPredicate, RunIn, ToolOptions

if TYPE_CHECKING:
    from pydantic import BaseModel


IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*\Z")
"""What tools, agents, roles and drivers may be called (contract section 3)."""

_CONTEXT_PARAMETER = "ctx"


class ToolArgumentError(ValueError):
    """The arguments do not fit the tool's schema; the text is fit for the model to read."""


class Tool:
    """A function with a name, a description and a JSON schema of its arguments.

    Args:
        function: sync or async, or a generator of either kind, whose values are progress. A parameter named
            ``ctx`` receives a :class:`ToolContext` (in a task a :class:`TaskContext`) and is no part of the
            schema. Sync functions that take long should look at ``ctx.cancelled``.
        name: the tool id that grants name; the function's own name when left out.
        description: the docstring when left out.
        options: where and how it runs.

    Raises:
        ValidationFailed: a name, a signature or options that cannot be; ``path`` names the member at fault.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        options: ToolOptions | None = None,
        _hints: Mapping[str, Any] | None = None,
    ) -> None:
        self.function = function
        self.options = options or ToolOptions()
        self.name = name or function.__name__
        self.description = (description or inspect.getdoc(function) or "").strip()
        if not IDENTIFIER.match(self.name):
            raise ValidationFailed(
                f"tool name {self.name!r} must start with a letter or digit and go on with letters, digits "
                "and . _ : / -",
                path="tool.name",
            )
        self.is_async = _is_any(function, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        self.run_in: RunIn = self.options.check(self.name, is_async=self.is_async)
        """Where it runs."""
        self.takes_context = _CONTEXT_PARAMETER in inspect.signature(function).parameters
        self.__doc__ = self.description
        self.__module__ = getattr(function, "__module__", type(self).__module__)
        self._qualname = getattr(function, "__qualname__", "")
        # A copy in another process may not find the names in its hints any more.
        self._hints = _resolved_hints(self.name, function) if _hints is None else _hints
        if self.run_in == "task" and self._hints.get(_CONTEXT_PARAMETER) is ToolContext:
            raise ValidationFailed(
                f"tool {self.name}: in a task there are no services; annotate ctx with retinue.TaskContext",
                path=f"{self.name}.{_CONTEXT_PARAMETER}",
            )
        self._names, self._arguments, self.parameters = _arguments_model(self.name, function, self._hints)

    @property
    def schema(self) -> ToolSchema:
        """The tool as a provider is told of it."""
        return ToolSchema(self.name, self.description, self.parameters)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them; :class:`ToolArgumentError` names each that is wrong."""
        from pydantic import ValidationError

        try:
            parsed = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in problem['loc']) or 'arguments'}: {problem['msg']}"
                for problem in error.errors(include_url=False, include_input=False)
            )
            raise ToolArgumentError(f"invalid arguments for {self.name}: {problems}") from None
        return {name: getattr(parsed, field) for field, name in self._names.items()}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The plain function, for use outside of a run; nothing is counted or gated."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Tool {self.name}>"

    def __reduce__(self) -> tuple[Any, ...] | str:
        # A decorated function of an importable module travels by name, like a plain function would.
        import cloudpickle  # type: ignore[import-untyped]

        module = self.__module__
        by_value = module == "__main__" or module in cloudpickle.list_registry_pickle_by_value()
        if not by_value and getattr(sys.modules.get(module), self._qualname, None) is self:
            return str(self._qualname)
        return _rebuild, (self.function, self.name, self.description, self.options, self._hints)


def _rebuild(
    function: Callable[..., Any], name: str, description: str, options: ToolOptions, hints: Mapping[str, Any]
) -> Tool:
    return Tool(function, name=name, description=description, options=options, _hints=hints)


def _is_any(function: Callable[..., Any], *kinds: Callable[[Any], bool]) -> bool:
    """Whether a function, or what calling an object calls, is of one of these kinds."""
    called = getattr(function, "__call__", None)  # noqa: B004 - looks at the method, does not test callability
    return any(kind(function) or kind(called) for kind in kinds)


def _resolved_hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ValidationFailed(f"tool {name}: a type hint cannot be resolved: {error}", path=name) from None


def _arguments_model(
    name: str, function: Callable[..., Any], hints: Mapping[str, Any]
) -> tuple[dict[str, str], type[BaseModel], dict[str, Any]]:
    """Parameters by the model's field names, the model, and its JSON schema.

    Fields are numbered and parameters are their aliases, because a parameter may be called what a field may
    not (``schema``, ``_id``).
    """
    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    names: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == _CONTEXT_PARAMETER:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValidationFailed(
                f"tool {name}: parameter {parameter} cannot be described by a schema; use named parameters",
                path=f"{name}.{parameter.name}",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        field = f"p{len(names)}"
        names[field] = parameter.name
        fields[field] = (hints.get(parameter.name, Any), Field(default=default, alias=parameter.name))
    try:
        model = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except PydanticUserError as error:
        why = str(error).splitlines()[0]
        raise ValidationFailed(f"tool {name}: its parameters cannot be described: {why}", path=name) from None
    schema.pop("title", None)
    return names, model, schema


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    run_in: RunIn | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: int | None = None,
    resources: Mapping[str, float] | None = None,
    timeout: float | None = None,
    max_result_bytes: int = MAX_RESULT_BYTES,
    effect: Effect = "unknown",
    requires_approval: bool | ApprovalPredicate | None = None,
    cache: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    resources: Mapping[str, float] | None = None,
    **options: Any,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a :class:`Tool` of a function: ``@tool``, or ``@tool(name=..., timeout=..., ...)``.

    The schema comes from the type hints (anything pydantic understands), the description from the docstring.
    The other keywords are those of :class:`ToolOptions`.
    """
    how = ToolOptions(resources={} if resources is None else resources, **options)
    if function is not None:
        return Tool(function, name=name, description=description, options=how)
    return lambda target: Tool(target, name=name, description=description, options=how)


def check_kind(path: str, value: object, kind: Any) -> None:
    """Raise ``ValidationFailed`` naming ``path`` unless ``value`` is of this kind."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = getattr(kind, "__name__", str(kind))
        raise ValidationFailed(f"{path} must be a {wanted}, not {value!r:.80}", path=path)


def check_tools(tools: Sequence[object], path: str) -> tuple[Tool, ...]:
    """``tools`` as a tuple; :class:`ValidationFailed` names what is no tool, or a repeated name."""
    checked: list[Tool] = []
    for index, item in enumerate(tools):
        if not isinstance(item, Tool):
            raise ValidationFailed(
                f"{path}[{index}] is {item!r:.80}; decorate it with @tool", path=f"{path}[{index}]"
            )
        if item.name in (other.name for other in checked):
            raise ValidationFailed(f"{path} has two tools named {item.name}", path=path)
        checked.append(item)
    return tuple(checked)


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool call gave: always a result, denials and errors included (contract section 7)."""

    call_id: str
    tool_name: str
    text: str
    error: bool = False
    """True for denials too."""
    denied: bool = False
    denial: DenialKind | None = None
    """Why it was denied."""
    artifact_id: str | None = None
    """Of the whole result, where ``text`` is not all of it."""
