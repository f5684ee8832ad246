"""The main process: spawns the children, serves HTTP, and lives and dies by the rules of its release.

What is where: a start that fails ends in `_give_up` (exit 1, 2 or 3); a child's exception and a killed child end in
`_kill_tree` (SIGKILL for all, itself too); SIGTERM drains once a request was seen, and before that ends at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from sim_nvml.state import SimNvml
from sim_sglang import flags, noise
from sim_sglang.detokenizer import run_detokenizer
from sim_sglang.engine import Engine, Status
from sim_sglang.faults import Fault, Faults
from sim_sglang.flags import Refused, ServerArgs
from sim_sglang.logs import Log
from sim_sglang.messages import Minimum, Ready, Shutdown
from sim_sglang.profiles import PROFILES
from sim_sglang.scheduler import Seat, run_scheduler
from sim_sglang.settings import Settings
from sim_sglang.warmup import Warmup
from sim_sglang.web import Web

IMPORT_S, CHILD_POLL_S, DRAIN_POLL_S, SCHEDULERS_END_S = 4.0, 1.0, 5.0, 15.0
ENTRYPOINT = '  File "/opt/sglang/site/sglang/srt/entrypoints/engine.py", line 1362, in _wait_for_scheduler_ready\n'


def main(argv: Sequence[str]) -> int:
    """Run one server to its end; the answer is the exit status of those ends that are no signal."""
    settings = Settings.from_environment()
    log = Log()
    try:
        args = flags.parse(settings.release, PROFILES[settings.profile], argv)
        try:
            flags.resolve(args, PROFILES[settings.profile])
        finally:
            _say_notes(args, log)
        gpus = _gpus(args)
    except Refused as refused:
        log.bare(refused.text + "\n")
        return refused.status
    settings.rest(IMPORT_S)
    for line in (*noise.around_arguments(), args.line(), *noise.behind_arguments()):
        log.say(line)
    status = Launcher(args, settings, log, gpus).run()
    os._exit(status)  # past multiprocessing's own exit, which would wait for a child that was told to outlive us


def _say_notes(args: ServerArgs, log: Log) -> None:
    if args.release.at_least("0.5.16") and not sys.warnoptions:
        log.bare(
            "/opt/sglang/site/sglang/launch_server.py:56: UserWarning: 'python -m sglang.launch_server' is still"
            " supported, but 'sglang serve' is the recommended entrypoint.\n"
            "  Example: sglang serve --model-path <model> [options]\n"
        )
    for line in noise.before_arguments(args):
        log.say(line)
    for note in args.notes:
        log.say(note) if args.release.at_least("0.5.10") else log.bare(note + "\n")


def _gpus(args: ServerArgs) -> list[int]:
    """The card of each rank. Raises Refused where there are too few."""
    if args.on_cpu:
        return [0] * args.tp
    count = len(SimNvml().cards())
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [int(one) for one in named.split(",")] if named else list(range(count))
    if not count:
        text = "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA) is available."
        raise Refused(flags.traceback(args.release, ["utils/common.py"], text), 1)
    wanted = visible[args.get("base_gpu_id") or 0 :][: args.tp]
    if len(wanted) < args.tp or max(wanted) >= count:
        text = "torch.AcceleratorError: CUDA error: invalid device ordinal"
        raise Refused(flags.traceback(args.release, ["utils/common.py"], text), 1)
    return wanted


class Launcher:
    """One server's main process from the first child to the end."""

    def __init__(self, args: ServerArgs, settings: Settings, log: Log, gpus: list[int]) -> None:
        self.args, self.settings, self.log, self.gpus = args, settings, log, gpus
        self.release = args.release
        self.faults = Faults.of(settings)
        self.links: list[Connection] = []
        self.schedulers: list[BaseProcess] = []
        self.children: list[BaseProcess] = []
        self.wake = threading.Event()
        self.stop_signal: int | None = None
        self.serving = threading.Event()
        self.first_request = False
        self.child_crash_seen = False

    def run(self) -> int:
        signal.signal(signal.SIGQUIT, self._child_failed_at_start)
        source = self._spawn()
        infos = self._wait_for_schedulers()
        if infos is None:
            self._kill_children()
            return 1
        engine = Engine(self.args, infos[0], self.links[0], self.settings)
        engine.on_first_request = self._on_first_request
        engine.listen(source)
        return self._serve(engine)

    # -- children

    def _spawn(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        from_scheduler, to_detokenizer = context.Pipe(duplex=False)
        from_detokenizer, to_main = context.Pipe(duplex=False)
        for rank, gpu in enumerate(self.gpus):
            ours, theirs = context.Pipe()
            seat = Seat(rank, gpu, theirs, to_detokenizer if rank == 0 else None)
            process = context.Process(target=run_scheduler, args=(seat, self.args, self.settings))
            process.start()
            theirs.close()
            self.links.append(ours)
            self.schedulers.append(process)
        detokenizer = context.Process(target=run_detokenizer, args=(from_scheduler, to_main, self.settings))
        detokenizer.start()
        for end in (from_scheduler, to_detokenizer, to_main):
            end.close()
        self.children = [*self.schedulers, detokenizer]
        return from_detokenizer

    def _wait_for_schedulers(self) -> list[dict[str, Any]] | None:
        """Let the ranks meet until all are ready; None, with the words said, if one died without an exception."""
        ready: dict[int, dict[str, Any]] = {}
        numbers: dict[int, int] = {}
        while len(ready) < len(self.links):
            waiting = [self.links[rank] for rank in range(len(self.links)) if rank not in ready]
            for link in wait(waiting):
                rank = self.links.index(link)  # type: ignore[arg-type]
                try:
                    message = self.links[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._say_scheduler_died(rank)
                    return None
                if isinstance(message, Ready):
                    ready[rank] = message.info
                else:
                    numbers[rank] = message.value
            if len(numbers) == len(self.links):
                self._answer(min(numbers.values()))
                numbers.clear()
        return [ready[rank] for rank in sorted(ready)]

    def _answer(self, least: int) -> None:
        for link in self.links:
            with suppress(BrokenPipeError, ConnectionResetError):
                link.send(Minimum(least))

    def _say_scheduler_died(self, rank: int) -> None:
        self.schedulers[rank].join()
        code = self.schedulers[rank].exitcode
        if self.release.watches_children:
            error = (
                f"RuntimeError: Rank {rank} scheduler died during initialization (exit code: {code})."
                " If exit code is -9 (SIGKILL), a common cause is the OS OOM killer."
                " Run `dmesg -T | grep -i oom` to check."
            )
        else:
            self.log.say(f"Rank {rank} scheduler is dead. Please check if there are relevant logs.")
            self.log.say(f"Exit code: {code}")
            error = "EOFError"
        self.log.bare(f"Traceback (most recent call last):\n{ENTRYPOINT}{error}\n")

    # -- serving

    def _serve(self, engine: Engine) -> int:
        pid = os.getpid()
        self.engine = engine
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._uvicorn_stop)
        self.log.say(f"INFO:     Started server process [{pid}]")
        self.log.say("INFO:     Waiting for application startup.")
        for line in noise.application_startup(self.args):
            self.log.say(line)
        self.log.say("INFO:     Application startup complete.")
        warmup = Warmup(self.args, self.settings, self.log, self._warm_up_failed)
        try:
            web = Web(engine, self.log)
        except OSError as error:
            return self._address_in_use(error, warmup)
        host, port = self.args.get("host"), self.args.get("port")
        self.log.say(f"INFO:     Uvicorn running on http://{host}:{port} (Press CTRL+C to quit)")
        threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        warmup.start(lambda: setattr(engine, "status", Status.UP))
        return self._supervise()

    def _supervise(self) -> int:
        """Main's loop: watches children and waits for signals, whose handlers run in this thread."""
        pause = CHILD_POLL_S * self.settings.time_scale
        while True:
            self.wake.wait(pause)
            self.wake.clear()
            if self.first_request and not self.serving.is_set():
                self._install_serving_handlers()
            if self.stop_signal is not None:
                return self._uvicorn_end(self.stop_signal)
            if self.engine.draining:
                self._drain()
            self._watch_children()

    def _on_first_request(self) -> None:
        """In an HTTP thread: the handlers of a serving server are in place before the request goes on."""
        if not self.serving.is_set():
            self.first_request = True
            self.wake.set()
            self.serving.wait()

    def _install_serving_handlers(self) -> None:
        signal.signal(signal.SIGTERM, self._start_drain)
        signal.signal(signal.SIGQUIT, self._child_failed)
        self.serving.set()

    def _address_in_use(self, error: OSError, warmup: Warmup) -> int:
        address = (self.args.get("host"), self.args.get("port"))
        self.log.say(
            f"ERROR:    [Errno {error.errno}] error while attempting to bind on address {address!r}:"
            " address already in use"
        )
        self.log.say("INFO:     Waiting for application shutdown.")
        self.log.say("INFO:     Application shutdown complete.")
        if self.release.warms_up_against_a_stranger:
            warmup.start(lambda: None).join()
        self._kill_children()
        return self.release.bind_failure_status

    def _warm_up_failed(self, text: str) -> None:
        self.log.say(f"Initialization failed. warmup error: {text}")
        self._kill_tree()

    # -- ends

    def _uvicorn_stop(self, number: int, _frame: object) -> None:
        self.stop_signal = number
        self.wake.set()

    def _uvicorn_end(self, number: int) -> int:
        """uvicorn's own way out: it raises the signal again, but for SIGINT in older releases."""
        self.log.say("INFO:     Shutting down")
        self.log.say("INFO:     Waiting for application shutdown.")
        self.log.say("INFO:     Application shutdown complete.")
        self.log.say(f"INFO:     Finished server process [{os.getpid()}]")
        if number == signal.SIGINT and not self.release.at_least("0.5.20"):
            self._kill_children()
            return 0
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        raise AssertionError("the signal's default action ends this process")

    def _start_drain(self, _number: int, _frame: object) -> None:
        self.engine.draining = True
        self.log.say("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")

    def _drain(self) -> None:
        """Looks every five seconds, without end, whether all requests are done; requests still come in meanwhile."""
        while True:
            self._pause(DRAIN_POLL_S)
            remaining = self.engine.remaining() or (["phantom"] if self.faults.on(Fault.NO_DRAIN) else [])
            if self.engine.status is Status.UNHEALTHY:
                self.log.say("Signal SIGTERM received while health check failed. Force exiting.")
                self._crash_diagnostics()
                self._kill_tree()
            if os.environ.get("SGL_FORCE_SHUTDOWN") == "1":
                self.log.say("Signal SIGTERM received while force shutdown flag set. Force exiting.")
                self._kill_tree()
            self.log.say(
                f"Gracefully exiting... Remaining number of requests {len(remaining)}."
                f" Remaining requests remaining_rids={remaining}."
            )
            if not remaining:
                self._end_drained()

    def _pause(self, seconds: float) -> None:
        """Let real-server seconds pass, with an eye on the children."""
        end = time.monotonic() + seconds * self.settings.time_scale
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, CHILD_POLL_S * self.settings.time_scale))
            self._watch_children()

    def _end_drained(self) -> NoReturn:
        self.child_crash_seen = True  # from here on children are expected to end
        if self.release.asks_schedulers_to_end:
            for link in self.links:
                with suppress(BrokenPipeError, ConnectionResetError):
                    link.send(Shutdown())
            late = self._not_ended(SCHEDULERS_END_S * self.settings.time_scale)
            if self.release.drained_exit_is_clean:
                self._leave(late)
        self._kill_tree()

    def _not_ended(self, seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        for process in self.schedulers:
            process.join(max(0.0, end - time.monotonic()))
        return [process.pid or 0 for process in self.schedulers if process.is_alive()]

    def _leave(self, late: list[int]) -> NoReturn:
        if late:
            self.log.say(
                "Schedulers still alive 15s after ShutdownReq, killing them before they released: " + repr(late)
            )
        self._kill_children()
        os._exit(0)

    def _child_failed_at_start(self, _number: int, _frame: object) -> None:
        self.log.say("Received sigquit from a child process. It usually means the child failed.")
        self._kill_tree()

    def _child_failed(self, _number: int, _frame: object) -> None:
        self.log.say("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        self._crash_diagnostics()
        self._kill_tree()

    def _crash_diagnostics(self) -> None:
        wanted = [os.environ.get(f"SGLANG_{name}_BEFORE_CRASH", "1") for name in ("PYSPY_DUMP", "CUDA_COREDUMP")]
        if not self.release.runs_crash_diagnostics or not any(one.lower() in ("1", "true") for one in wanted):
            return
        self.log.say("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
        self.settings.rest(5)
        if not any(_runs(process) for process in self.schedulers):
            self.log.say("No live scheduler processes found; skipping py-spy and CUDA coredump.")
            return
        self.log.say("Waiting 60.0 seconds for CUDA coredumps before exiting.")
        self.settings.rest(60 + 15)

    def _watch_children(self) -> None:
        """A child that a signal killed brings the server down, but up to 0.5.9 nobody looked."""
        if not self.release.watches_children or self.child_crash_seen or self.faults.on(Fault.DEAD_SCHEDULER):
            return
        names = [*(f"scheduler_{rank}" for rank in range(len(self.schedulers))), "detokenizer"]
        for name, process in zip(names, self.children, strict=True):
            code = process.exitcode
            if code:
                self.child_crash_seen = True
                self.log.say(
                    f"Subprocess {name} (pid={process.pid}) crashed with exit code {code}."
                    " Triggering SIGQUIT for cleanup..."
                )
                os.kill(os.getpid(), signal.SIGQUIT)
                return

    def _kill_tree(self) -> NoReturn:
        """SIGKILL for every descendant and then itself: the status that systemd sees of most ends."""
        pid = os.getpid()
        if self.release.logs_tree_kill:
            self.log.say(f"kill_process_tree called: parent_pid={pid}, include_parent=True, pid={pid}")
        self._kill_children()
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("SIGKILL ends this process")

    def _kill_children(self) -> None:
        for process in self.children:
            spared = self.faults.on(Fault.LEAK_CHILD) and process is self.schedulers[-1]
            if _runs(process) and not spared:
                _kill(process.pid)
        _kill(getattr(resource_tracker._resource_tracker, "_pid", None))


def _runs(process: BaseProcess) -> bool:
    return process.exitcode is None


def _kill(pid: int | None) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
