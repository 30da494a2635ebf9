"""The main job: a question put to a folder of documents, answered by a team of delegates under one budget."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from retinue.cluster.interrupts import INTERRUPTED, Interrupts
from retinue.errors import InputError, RetinueError

if TYPE_CHECKING:
    from retinue.cluster.demo_output import Output
    from retinue.docqa.documents import Folder
    from retinue.handles import RunHandle
    from retinue.results import RunResult
    from retinue.runtime import Runtime
    from retinue.teams import Team

DEFAULT_QUESTION = "What happens to a run, its delegates and what they reserved when a process dies?"
DEFAULT_DELEGATES = 4
MOST_DELEGATES = 256
DEFAULT_MAX_TOKENS = 200_000
CALLS_PER_DELEGATE = 6
"""Model calls that the default limit allows each delegate; the embedded model needs two."""
COORDINATOR_CALLS = 4
CHARACTERS_PER_TOKEN = 3.6
"""Of numbered English text, roughly; to say beforehand whether a token limit can be enough."""
REDRAW_SECONDS = 0.1

COMPLETED, FAILED, STOPPED = 0, 1, 3
"""Exit statuses of :func:`run`, beside :data:`INTERRUPTED`."""
CANCEL_REASON = "interrupted by the user"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `retinue demo` can be told."""

    folder: Path | None = None
    """Folder of documents; Retinue's own docs by default, where there is a checkout."""
    question: str | None = None
    """What is asked; with the default folder there is a default question."""
    delegates: int = DEFAULT_DELEGATES
    """How many delegates share the documents, at most."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Limit over the coordinator and all delegates, input and output together."""
    max_model_calls: int | None = None
    """By default :data:`CALLS_PER_DELEGATE` for each delegate and :data:`COORDINATOR_CALLS` more."""
    max_tool_calls: int | None = None
    """By default two for each part that is to be read."""
    model: str = "extractive"
    """``extractive`` or ``openai:NAME``."""
    base_url: str | None = None
    """Of an OpenAI-compatible server."""
    session: str | None = None
    """The conversation to go on with; a new one by default."""
    store: str | None = None
    """URL of the store; the user's own by default."""
    json: bool = False
    """Events and one summary as JSON lines on standard output, everything else on standard error."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A demo that is ready to start."""

    options: DemoOptions
    question: str
    folder: Folder
    team: Team
    parts: dict[str, int]
    session: str
    store_url: str
    began: float


def run(options: DemoOptions) -> int:
    """Run the demo in the foreground.

    Returns:
        The exit status: 0 completed, 1 failed, 3 stopped by the budget, 130 cancelled.
    """
    stdout = sys.stdout
    # What libraries print (Ray does) is not JSON: with --json only the output goes to standard output.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        return _run(options, stdout)


def _run(options: DemoOptions, stdout: TextIO) -> int:
    began = time.monotonic()
    stream = sys.stderr if options.json else sys.stdout
    # Before anything is imported or read: a person should see at once that something happens.
    print("retinue demo: reading the documents and starting Ray ...", file=stream, flush=True)
    try:
        from retinue.cluster.demo_output import Output

        output = Output(json=options.json, stdout=stdout)
        try:
            job = _prepare(options, began)
            output.introduce(_introduction(job))
            runtime = _runtime(job)
        except RetinueError as error:
            output.failed(error, began)
            return FAILED
    except KeyboardInterrupt:
        print("interrupted before anything was started", file=stream, flush=True)
        return INTERRUPTED
    return _conduct(job, runtime, output)


# --- before the start -------------------------------------------------------------------------------------


def _prepare(options: DemoOptions, began: float) -> _Job:
    from retinue.docqa.app import build_team
    from retinue.docqa.documents import plan_parts, read_folder
    from retinue.ids import new_id
    from retinue.providers import model_from_name
    from retinue.storage.opening import default_url, normalise_url

    if not 1 <= options.delegates <= MOST_DELEGATES:
        raise InputError(
            f"--delegates must be from 1 to {MOST_DELEGATES}, not {options.delegates}", field="delegates"
        )
    model = model_from_name(options.model, options.base_url)
    store_url = normalise_url(options.store) if options.store else default_url()
    folder = read_folder(options.folder if options.folder is not None else default_folder())
    question = (options.question if options.question is not None else "").strip()
    if not question:
        if options.folder is not None or options.question is not None:
            raise InputError('ask something of these documents: --question "..."', field="question")
        question = DEFAULT_QUESTION
    shares = plan_parts(folder.documents, options.delegates)
    team = build_team(shares, model)
    return _Job(
        options=options,
        question=question,
        folder=folder,
        team=team,
        parts={member.name: len(share) for member, share in zip(team.members, shares, strict=True)},
        session=options.session or new_id("demo")[:13],
        store_url=store_url,
        began=began,
    )


def default_folder() -> Path:
    """Retinue's own docs: of a checkout in the working directory, else of the one that this package is in.

    Raises:
        InputError: there is no checkout, as when Retinue was installed from a wheel.
    """
    package = importlib.util.find_spec("retinue")
    places = [Path.cwd()]
    if package is not None and package.origin is not None:
        places.append(Path(package.origin).resolve().parents[1])
    for place in places:
        try:
            is_ours = '\nname = "retinue"\n' in (place / "pyproject.toml").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if is_ours and (place / "docs").is_dir():
            return place / "docs"
    raise InputError(
        "Retinue's own docs are not here (they come with a checkout, not with the installed package); name a "
        'folder of text or Markdown and ask it something: --folder DIR --question "..."',
        field="folder",
    )


def _introduction(job: _Job) -> list[str]:
    """What will be done with what, and what is left out."""
    folder, options = job.folder, job.options
    count = len(folder.documents)
    share = f"{_counted(count, 'document')}, {folder.characters:,} characters"
    lines = [
        f"folder    {shown_path(folder.path)}: {share}, for {_counted(len(job.parts), 'delegate')}",
        f"question  {job.question}",
        f"model     {options.model}{f' at {options.base_url}' if options.base_url else ''}",
    ]
    lines += [f"skipped   {skipped.name}: {skipped.reason}" for skipped in folder.skipped]
    needed = int(folder.characters / CHARACTERS_PER_TOKEN)
    if needed > options.max_tokens:
        lines.append(
            f"note      the documents alone have about {needed:,} tokens, the limit (--max-tokens) is "
            f"{options.max_tokens:,}: the run will probably stop early"
        )
    return lines


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _runtime(job: _Job) -> Runtime:
    from retinue.budgets import Budgets
    from retinue.docqa.app import READ_PART, estimate_input_tokens
    from retinue.grants import Grants
    from retinue.runtime import Runtime
    from retinue.team_driver import team_driver

    options = job.options
    calls = COORDINATOR_CALLS + CALLS_PER_DELEGATE * len(job.parts)
    attempts = 2 * sum(job.parts.values())
    return Runtime(
        driver=team_driver(job.team),
        grants=Grants(tool_ids=[READ_PART], model_roles=["main"]),
        budgets=Budgets(
            max_model_calls=calls if options.max_model_calls is None else options.max_model_calls,
            max_tool_calls=attempts if options.max_tool_calls is None else options.max_tool_calls,
            max_tokens=options.max_tokens,
        ),
        estimate_input_tokens=estimate_input_tokens,
        name="retinue-demo",
        store=options.store and job.store_url,
    )


# --- the run ----------------------------------------------------------------------------------------------


def _conduct(job: _Job, runtime: Runtime, output: Output) -> int:
    """Start the run, show it, and see it to its end, whatever the person does."""
    interrupts = Interrupts()
    try:
        status = asyncio.run(_Conductor(job, runtime, output, interrupts).conduct())
    except RetinueError as error:
        output.failed(error, job.began)
        status = FAILED
    finally:
        interrupts.restore()
    return status


class _Conductor:
    """Follows one run for one person."""

    def __init__(self, job: _Job, runtime: Runtime, output: Output, interrupts: Interrupts) -> None:
        self._job = job
        self._runtime = runtime
        self._output = output
        self._interrupts = interrupts
        self._interrupted = asyncio.Event()
        self._given_up = asyncio.Event()

    async def conduct(self) -> int:
        from retinue.cluster.live_view import Progress
        from retinue.ids import Identity

        progress = Progress(self._job.parts)
        self._interrupts.watch(self._interrupt)
        handle = self._runtime.start(
            self._job.question,
            identity=Identity(tenant_id="demo", user_id="you"),
            session_id=self._job.session,
        )
        with self._output.live(progress, self._job.question):
            following = asyncio.ensure_future(self._follow(handle))
            drawing = asyncio.ensure_future(self._draw(handle))
            cancelling = asyncio.ensure_future(self._cancel(handle))
            giving_up = asyncio.ensure_future(self._given_up.wait())
            try:
                await asyncio.wait([following, giving_up], return_when=asyncio.FIRST_COMPLETED)
            finally:
                helpers = (drawing, cancelling, giving_up)
                for task in (*helpers, *([] if following.done() else [following])):
                    task.cancel()
                # What a helper raised says nothing that the run's result does not say.
                await asyncio.gather(following, *helpers, return_exceptions=True)
        if following.cancelled():
            self._output.abandoned(
                session=self._job.session,
                store=self._job.store_url,
                run_id=handle.run_id,
                wall=time.monotonic() - self._job.began,
            )
            return INTERRUPTED
        return await self._report(handle, following.result())

    async def _follow(self, handle: RunHandle) -> RunResult:
        """Show every event; the result."""
        from retinue.errors import EventGap

        cursor = 0
        while True:
            try:
                async for event in handle.events(after=cursor):
                    cursor = event.sequence
                    self._output.event(event)
                break
            except EventGap as gap:
                cursor = gap.earliest_cursor
        return await handle.result()

    async def _draw(self, handle: RunHandle) -> None:
        while True:
            self._output.draw(handle.budget)
            await asyncio.sleep(REDRAW_SECONDS)

    def _interrupt(self) -> None:
        if self._interrupted.is_set():
            self._given_up.set()
        self._interrupted.set()

    async def _cancel(self, handle: RunHandle) -> None:
        await self._interrupted.wait()
        self._output.cancelling()
        await handle.cancel(CANCEL_REASON)

    async def _report(self, handle: RunHandle, result: RunResult) -> int:
        job = self._job
        # What was refused was never stored: there is nothing to continue.
        stored = result.final_cursor > 0
        self._output.finish(
            result,
            session=job.session,
            store=await self._runtime.store_url() if stored else job.store_url,
            hops=handle.hops,
            wall=time.monotonic() - job.began,
            continue_with=continuing_command(job.options, job.session) if stored else None,
        )
        if result.status == "cancelled":
            return INTERRUPTED
        return {"completed": COMPLETED, "stopped": STOPPED}.get(result.status, FAILED)


# --- words ------------------------------------------------------------------------------------------------


def continuing_command(options: DemoOptions, session: str) -> str:
    """The command that puts a second question to the same session, ready for a shell."""
    words = [*program(), "demo", "--session", session]
    if options.folder is not None:
        words += ["--folder", str(options.folder)]
    for name, value, default in (
        ("--delegates", options.delegates, DEFAULT_DELEGATES),
        ("--max-tokens", options.max_tokens, DEFAULT_MAX_TOKENS),
        ("--max-model-calls", options.max_model_calls, None),
        ("--max-tool-calls", options.max_tool_calls, None),
        ("--model", options.model, "extractive"),
        ("--base-url", options.base_url, None),
        ("--store", options.store, None),
    ):
        if value != default:
            words += [name, str(value)]
    return f'{shlex.join(words)} --question "And what else is said about that?"'


def program() -> list[str]:
    """How this program was called, as words that a shell in the working directory understands."""
    called = Path(sys.argv[0])
    if called.name != "retinue":
        return ["python", "-m", "retinue"]
    on_path = shutil.which("retinue")
    if on_path is not None and Path(on_path).resolve() == called.resolve():
        return ["retinue"]
    return [shown_path(called)]


def shown_path(path: Path) -> str:
    """A path relative to the working directory, where it is below it."""
    absolute = path.absolute()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)
