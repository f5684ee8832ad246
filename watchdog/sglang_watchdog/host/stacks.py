"""What the processes of a hanging launch are doing, looked at while they still live. Touches none of them.

The kernel tells their state. Their Python stacks come from py-spy, where SGLang's environment or the host has it: it
reads their memory and does not stop them (`--nonblocking`), in a transient unit of systemd's, since the sandbox of our
service has no room for it. No value of any variable is read. The whole goes to a file, the innermost frames into the
incident.
"""

import asyncio
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_watchdog.domain.errors import WatchdogError
from sglang_watchdog.domain.evidence import Evidence, Source
from sglang_watchdog.domain.secrets import redact_text
from sglang_watchdog.host import processes, transient

FOLDER = "hangs"  # in the state folder
_PROGRAM = "py-spy"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_MOST_PROCESSES = 24  # a launch of eight cards has some twenty
_MOST_DUMPS = 12
_AT_ONCE = 3
_DUMP_DEADLINE_S = 10.0
_ALL_DEADLINE_S = 30.0
_LONGEST_DUMP = 128 << 10
_KEPT = 20
_FRAMES = 5
# It reads the memory of others, and nothing else: no network, nothing to write to, no more rights by any file.
_SANDBOX = (
    *("CapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH", "NoNewPrivileges=yes", "ProtectSystem=strict"),
    *("ProtectHome=read-only", "PrivateNetwork=yes", "MemoryMax=1G", "TasksMax=16"),
)


@dataclass(frozen=True, slots=True)
class _Dump:
    pid: int
    name: str
    text: str = ""
    why_not: str = ""


def states(control_groups: Iterable[str], now: float) -> tuple[Evidence, ...]:
    """What the kernel says of each process: its state, and what it waits in."""
    words = (processes.doing(pid) for pid in _pids(control_groups)[:_MOST_PROCESSES])
    return tuple(Evidence(Source.PROCESS, text, now) for text in words if text)


async def save(control_groups: Sequence[str], python: str, folder: Path, name: str, now: float) -> tuple[Evidence, ...]:
    """The stacks of the processes of these groups, whole in the file `name` of `folder`. `python`: the interpreter of
    the launch, beside which its py-spy lies. Bounded in time and size; what cannot be had is said."""
    program = _found(python)
    if not program:
        return (Evidence(Source.PROCESS, "no stacks: py-spy is neither beside the server's Python nor in PATH", now),)
    if who := _writable_by_others(program):
        return (Evidence(Source.PROCESS, f"no stacks: {who} is not root's alone, so root does not run it", now),)
    dumps = await _dumped(program, control_groups)
    told = tuple(Evidence(Source.PROCESS, _in_short(dump), now) for dump in dumps)
    return (*told, Evidence(Source.FILE, _written(dumps, folder, name), now))


def _found(python: str) -> str:
    beside = Path(python).parent / _PROGRAM if python.startswith("/") else None
    if beside is not None and os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which(_PROGRAM, path=_PATH) or ""


def _writable_by_others(program: str) -> str:
    """The first part of its path that somebody else than root could change; empty where there is none. An environment
    that its server's user owns is a way for that user to become root."""
    real = Path(os.path.realpath(program))
    for part in (real, *real.parents):
        try:
            status = part.stat()
        except OSError:
            return str(part)
        if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return str(part)
    return ""


def _pids(control_groups: Iterable[str]) -> list[int]:
    return [process.pid for group in control_groups for process in processes.cgroup_processes(group)]


async def _dumped(program: str, control_groups: Sequence[str]) -> list[_Dump]:
    """SGLang's own first: what is titled so works on requests."""
    pids = sorted(_pids(control_groups), key=lambda pid: not processes.name(pid).startswith("sglang"))
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(pid: int) -> _Dump:
        async with limit:
            return await _dump(program, pid)

    tasks = [asyncio.create_task(one(pid)) for pid in pids[:_MOST_DUMPS]]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, timeout=_ALL_DEADLINE_S)
    finally:  # also where the daemon itself ends meanwhile
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [task.result() for task in tasks if task in done]


async def _dump(program: str, pid: int) -> _Dump:
    name = processes.name(pid)
    if processes.stuck_in_the_kernel(pid):  # reading its memory could hang as it does
        return _Dump(pid, name, why_not="it is stuck in the kernel")
    try:
        ended = await transient.run(
            *(program, "dump", "--nonblocking", "--pid", str(pid)),
            deadline=_DUMP_DEADLINE_S,
            description=f"sglang-watchdog looks at the stacks of {pid}",
            properties=_SANDBOX,
        )
    except WatchdogError as error:
        return _Dump(pid, name, why_not=str(error))
    text = "\n".join(_without_the_command(ended.printed[:_LONGEST_DUMP].decode(errors="replace")))
    return _Dump(pid, name, redact_text(text), "" if text else redact_text(ended.last_words) or "it printed nothing")


def _without_the_command(text: str) -> Iterator[str]:
    """py-spy begins with the whole command line, of as many lines as that has, and with it its secrets."""
    threads = False
    for line in text.splitlines():
        threads = threads or line.startswith("Thread ")
        if threads:
            yield line


def _in_short(dump: _Dump) -> str:
    """The innermost frames of its main thread, which py-spy names first."""
    if dump.why_not:
        return f"{dump.name} ({dump.pid}): no stack: {dump.why_not}"[:300]
    frames: list[str] = []
    for line in dump.text.splitlines()[1:]:
        if not line.startswith("    ") or len(frames) == _FRAMES:
            break
        frames.append(line.strip())
    return f"{dump.name} ({dump.pid}) is in {' < '.join(frames)}"[:600]


def _written(dumps: list[_Dump], folder: Path, name: str) -> str:
    """Says where. The oldest of the folder give way."""
    text = "\n\n".join(f"{dump.name} ({dump.pid})\n{dump.text or dump.why_not}" for dump in dumps)
    path = folder / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for old in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)[: -_KEPT + 1]:
            old.unlink()
        path.write_text(f"{text}\n")
        path.chmod(0o600)
    except OSError as error:
        return f"the whole stacks could not be written: {error.strerror or error}"
    return f"the whole stacks are in {path}"
