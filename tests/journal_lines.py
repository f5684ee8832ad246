"""Writes the journal of one launch entry by entry, for tests of what reads it."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sglang_watchdog.diagnosis.case import Case
from sglang_watchdog.diagnosis.engine import diagnose
from sglang_watchdog.diagnosis.timeline import Timeline, TimelineReader
from sglang_watchdog.domain.failure import Diagnosis
from sglang_watchdog.domain.journal import JournalEntry, MessageId

UNIT = "sglang.service"
INVOCATION = "a" * 32
MAIN_PID = 500
SCHEDULER_PID = 510
TRACEBACK = "Scheduler hit an exception: Traceback (most recent call last):"
STARTED_LINES = (
    "server_args=ServerArgs(model_path='/m', mem_fraction_static=0.85, max_running_requests=48, tp_size=1, dp_size=1)",
    "Init torch distributed begin.",
    "Load weight begin. avail mem=93.00 GB",
    "Load weight end. elapsed=1.00 s, type=LlamaForCausalLM, avail mem=63.00 GB, mem usage=30.00 GB.",
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 300000, K size: 24.00 GB, V size: 24.00 GB",
    "Memory pool end. avail mem=13.00 GB",
    "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2], avail mem=12.90 GB",
    "Capture target decode CUDA graph end. bs=[1, 2], elapsed=1.00 s, mem usage=0.20 GB, avail mem=12.70 GB",
    "max_total_num_tokens=300000, chunked_prefill_size=8192, max_running_requests=48, available_gpu_mem=12.70 GB",
    "The server is fired up and ready to roll!",
)


@dataclass
class LaunchLog:
    """Entries a second apart, unless said otherwise."""

    entries: list[JournalEntry] = field(default_factory=list)
    now: float = 1_780_000_000.0

    def _add(self, entry: JournalEntry, after: float) -> "LaunchLog":
        self.now += after
        self.entries.append(entry._replace(time=self.now, cursor=f"c{len(self.entries)}"))
        return self

    def systemd(self, message: str, after: float = 1.0, **fields: str) -> "LaunchLog":
        entry = JournalEntry(
            0.0,
            message,
            transport="journal",
            identifier="systemd",
            comm="systemd",
            pid=1,
            unit=UNIT,
            invocation=INVOCATION,
            message_id=fields.get("message_id", ""),
            unit_result=fields.get("unit_result", ""),
            exit_code=fields.get("exit_code", ""),
            exit_status=fields.get("exit_status", ""),
        )
        return self._add(entry, after)

    def sglang(self, *messages: str, after: float = 1.0, pid: int = SCHEDULER_PID, rank: str = "") -> "LaunchLog":
        """Lines with SGLang's prefix; a leading blank or a bare exception is written without one, as in a traceback."""
        for message in messages:
            text = message if _continues(message) else f"[2026-03-09 22:35:06{' ' if rank else ''}{rank}] {message}"
            entry = JournalEntry(0.0, text, transport="stdout", pid=pid, unit=UNIT, invocation=INVOCATION)
            self._add(entry, after)
        return self

    def kernel(self, message: str, after: float = 1.0) -> "LaunchLog":
        return self._add(JournalEntry(0.0, message, transport="kernel", identifier="kernel"), after)

    def started(self) -> "LaunchLog":
        return self.systemd(f"Started {UNIT} - SGLang.", message_id=MessageId.UNIT_STARTED)

    def ready(self) -> "LaunchLog":
        return self.started().sglang(*STARTED_LINES)

    def stopping(self) -> "LaunchLog":
        return self.systemd(f"Stopping {UNIT} - SGLang...", message_id=MessageId.UNIT_STOPPING, job_type="stop")

    def sigterm(self) -> "LaunchLog":
        line = "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
        return self.sglang(line, pid=MAIN_PID)

    def raises(self, exception: str, *frames: str, rank: str = "") -> "LaunchLog":
        """A scheduler's exception, and SGLang's own end after it."""
        self.sglang(TRACEBACK, rank=rank)
        return self.sglang(*(f'  File "/opt/sglang/srt/{frame}' for frame in frames), exception, after=0.0).own_kill()

    def own_kill(self) -> "LaunchLog":
        self.sglang("Received sigquit from a child process. It usually means the child failed.", pid=MAIN_PID, after=0)
        return self.sglang(
            "kill_process_tree called: parent_pid=500, include_parent=True, pid=500", pid=MAIN_PID, after=0
        )

    def ended(self, code: str = "killed", status: str = "9", result: str = "signal") -> "LaunchLog":
        words = {"9": "9/KILL", "15": "15/TERM", "1": "1/FAILURE", "0": "0/SUCCESS"}.get(status, status)
        message = f"{UNIT}: Main process exited, code={code}, status={words}"
        self.systemd(message, message_id=MessageId.PROCESS_EXIT, exit_code=code, exit_status=status)
        if result == "success":
            return self.systemd(f"{UNIT}: Deactivated successfully.", message_id=MessageId.UNIT_SUCCESS)
        message = f"{UNIT}: Failed with result '{result}'."
        return self.systemd(message, message_id=MessageId.UNIT_FAILED, unit_result=result)

    def timeline(self) -> Timeline:
        return timeline_of(self.entries)

    def diagnosis(self, **facts: object) -> Diagnosis:
        """`facts`: the other fields of the case."""
        return diagnose(replace(Case(timeline=self.timeline()), **facts))  # type: ignore[arg-type]


def timeline_of(entries: Iterable[JournalEntry]) -> Timeline:
    reader = TimelineReader(UNIT, INVOCATION)
    for entry in entries:
        reader.feed(entry)
    return reader.timeline()


def _continues(message: str) -> bool:
    bare_exception = message.split(":")[0].endswith(("Error", "Exception")) and "hit an" not in message
    return message.startswith(" ") or bare_exception
