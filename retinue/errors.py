"""Every error that Retinue raises on purpose.

    RetinueError
    ├── SessionConflict      session_conflict     another run or writer has the session
    ├── EventGap             event_gap            the cursor is older than what is kept
    ├── BudgetExhausted      budget_exhausted     the ledger refused an admission
    ├── InputError           invalid_input, input_pending, input_not_pending, input_mismatch,
    │                        input_already_resolved, run_finished
    ├── Unsupported          unsupported          asked for something that is not offered
    ├── ValidationFailed     invalid_harness      a definition or configuration is wrong
    ├── AccessDenied         access_denied        a grant does not cover the call
    ├── ToolFailed           tool_failed          a tool or effect raised, or was denied
    ├── ModelFailed          model_failed         a provider refused, failed or answered nonsense
    ├── CompactionFailed     compaction_failed    a request cannot be made to fit
    ├── NotFound             not_found            no such run, for this identity
    ├── Overloaded           overloaded           the cluster has no room now
    ├── StoreUnavailable     store_unavailable    the store cannot be opened or does not answer
    ├── LeaseLost            lease_lost           the writer was fenced: a newer epoch stands
    ├── DamagedRecord        damaged_record       something stored cannot be read
    ├── ChildLost            child_lost           the process of a child died
    ├── Interrupted          interrupted          the process of the run died
    ├── VersionMismatch      version_mismatch     the cluster speaks another protocol version
    ├── NotShippable         not_shippable        a value cannot travel to another process
    └── ClusterUnreachable   cluster_unreachable  no Ray at the address, or it refuses the token

Every error has a stable ``code``, survives pickling, and travels between processes as
:meth:`RetinueError.to_payload` / :func:`error_from_payload`. Data are attributes. Cancellation is not
here: inside a driver or a tool it is :class:`asyncio.CancelledError`, which is not an ``Exception``.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AccessDenied",
    "BudgetExhausted",
    "ChildLost",
    "ClusterUnreachable",
    "CompactionFailed",
    "DamagedRecord",
    "EventGap",
    "InputError",
    "Interrupted",
    "LeaseLost",
    "ModelFailed",
    "NotFound",
    "NotShippable",
    "Overloaded",
    "RetinueError",
    "SessionConflict",
    "StoreUnavailable",
    "ToolFailed",
    "Unsupported",
    "ValidationFailed",
    "VersionMismatch",
    "error_from_payload",
]

_BY_CODE: dict[str, type[RetinueError]] = {}


class RetinueError(Exception):
    """Something went wrong in Retinue.

    Args:
        message: what happened, the value or id at fault, the next step. The first line of the class's
            docstring when left out.
        code: one of the class's codes, when it has several.
        data: JSON-serialisable details, readable as attributes (``error.run_id``).
    """

    code: str = "retinue_error"
    codes: ClassVar[tuple[str, ...]] = ("retinue_error",)

    def __init__(self, message: str = "", *, code: str | None = None, **data: Any) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.data = {name: value for name, value in data.items() if value is not None}
        if code is not None:
            self.code = code
        super().__init__(self.message)

    def __init_subclass__(cls) -> None:
        cls.codes = cls.__dict__.get("codes", (cls.code,))
        if cls.__module__ != __name__:
            return  # an application's subclass travels as what it extends, and takes no code of ours
        for code in cls.codes:
            _BY_CODE[code] = cls

    def __getattr__(self, name: str) -> Any:
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_payload, (self.to_payload(),)

    def to_payload(self) -> dict[str, Any]:
        """This error as JSON-serialisable data: ``{code, message, data?}``."""
        payload: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.data:
            payload["data"] = self.data
        return payload


def error_from_payload(payload: dict[str, Any]) -> RetinueError:
    """The error that :meth:`RetinueError.to_payload` described; an unknown code gives the base class."""
    code = str(payload.get("code", "retinue_error"))
    error = _BY_CODE.get(code, RetinueError)(str(payload.get("message", "")), code=code)
    error.data = dict(payload.get("data") or {})
    return error


class SessionConflict(RetinueError):
    """Another run or writer has this session.

    Raised by ``accepted()``, ``sessions.read()``, ``import_legacy`` and a store's ``acquire``. ``run_id``
    names the run in the way, ``holder`` the process, ``retry_after`` the seconds after which a vanished
    holder's lease can be taken, each where known. Wait for that run, or cancel it.
    """

    code = "session_conflict"


class EventGap(RetinueError):
    """The events after this cursor are no longer kept.

    Raised by an event iterator, which then ends. ``earliest_cursor`` is the oldest cursor that can still
    be read from.
    """

    code = "event_gap"


class BudgetExhausted(RetinueError):
    """The budget does not cover this call.

    Raised by ``services.model``, ``control_model`` and ``finish_model``. ``resource`` is ``model_calls``,
    ``tokens`` or ``money``, ``remaining`` what is left of it, ``scope`` whose limit it is (``run``,
    ``delegate:<name>``, with ``/role:<role>`` for a role's). Uncaught, it ends the run as ``stopped``; these
    data are then in ``result.reason.data``, and ``runtime.resume(run, top_up=...)`` goes on.
    """

    code = "budget_exhausted"


class InputError(RetinueError):
    """The input is not acceptable.

    Raised by ``start``, ``send`` and ``reply``; ``code`` says which rule was broken.
    """

    code = "invalid_input"
    codes = (
        "invalid_input",
        "input_pending",
        "input_not_pending",
        "input_mismatch",
        "input_already_resolved",
        "run_finished",
    )


class Unsupported(RetinueError):
    """This is not supported.

    ``operation`` names what was asked for.
    """

    code = "unsupported"


class ValidationFailed(RetinueError):
    """A definition or configuration is not valid.

    Raised at construction; ``path`` names the member at fault (``config.budgets.max_tokens``).
    """

    code = "invalid_harness"


class AccessDenied(RetinueError):
    """The grants do not cover this call.

    Raised by ``services.model`` for a role that is not granted. A tool that is not granted gives a denied
    result instead, which the model sees.
    """

    code = "access_denied"


class ToolFailed(RetinueError):
    """An effect raised or was denied.

    Raised by ``services.dispatch_effect``; a tool's failure is a result, not an error.
    """

    code = "tool_failed"


class ModelFailed(RetinueError):
    """The model provider did not give a usable answer.

    Raised by ``services.model``, and by model clients. ``started`` is false when the provider certainly did
    not begin (unreachable, or it refused the request): nothing is charged then. ``retryable`` is true when
    the same call may well succeed later, after ``retry_after`` seconds where the provider says. ``usage`` is
    what the provider reported all the same, as a mapping of :class:`retinue.Usage` fields; without it a
    started call is charged with what was reserved for it.
    """

    code = "model_failed"

    @property
    def started(self) -> bool:
        return bool(self.data.get("started", True))

    @property
    def retryable(self) -> bool:
        return bool(self.data.get("retryable", False))

    @property
    def retry_after(self) -> float | None:
        """Seconds; ``None`` where the provider does not say."""
        return self.data.get("retry_after")


class CompactionFailed(RetinueError):
    """A conversation cannot be shortened to what the model may be sent.

    Raised by a context policy; uncaught, it fails the run.
    """

    code = "compaction_failed"


class NotFound(RetinueError):
    """There is no such run for this identity.

    Raised by handles of ``attach``; ``run_id`` is what was looked for.
    """

    code = "not_found"


class Overloaded(RetinueError):
    """The cluster has no room for another resident session now.

    Raised by ``accepted()``; nothing was stored. Try again later, close sessions, or raise the cap
    (``retinue up --max-resident``).
    """

    code = "overloaded"


class StoreUnavailable(RetinueError):
    """The store cannot be opened or does not answer.

    ``url`` is the store, without credentials, and ``reason`` the cause in a word where it is known:
    ``locked``, ``disk_full``, ``closed`` and those that ``retinue.storage.open_store`` lists.
    """

    code = "store_unavailable"


class LeaseLost(RetinueError):
    """Another writer has taken this session over.

    Raised by a store when a message carries an epoch that is no longer current. The activation that gets
    it must stop writing; its runs end ``interrupted``.
    """

    code = "lease_lost"


class DamagedRecord(RetinueError):
    """A stored record cannot be read.

    ``place`` names the table and key; the bytes are kept as they are.
    """

    code = "damaged_record"


class ChildLost(RetinueError):
    """The process that ran this child died.

    Raised by ``child.result()``; what the child had reserved is charged as unknown usage.
    """

    code = "child_lost"


class Interrupted(RetinueError):
    """The process that ran this run died before it ended.

    The reason of a result, seldom raised. History is as last committed plus the run's input.
    """

    code = "interrupted"


class VersionMismatch(RetinueError):
    """The cluster runs another protocol version of Retinue.

    ``ours`` is this package's version, ``theirs`` the list of those that stand. Install a matching
    package, or ``retinue down`` and ``retinue up`` with this one.
    """

    code = "version_mismatch"


class NotShippable(RetinueError):
    """A value cannot be sent to another process.

    Raised by ``Runtime(...)`` and ``services.delegate``; ``path`` names the member at fault
    (``config.driver.agent.tools[2].client``). Create clients where they are used: in the tool, or in an
    app factory.
    """

    code = "not_shippable"


class ClusterUnreachable(RetinueError):
    """No Ray cluster answers at this address, or it refuses the token.

    ``address`` is what was tried.
    """

    code = "cluster_unreachable"
