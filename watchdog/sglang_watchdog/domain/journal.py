"""One journal entry, as `journalctl -o json` and the live pull both give it."""

from dataclasses import dataclass
from enum import StrEnum


class MessageId(StrEnum):
    """systemd's own message ids, matched before any English (systemd's catalog)."""

    UNIT_STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"
    UNIT_STARTED = "39f53479d3a045ac8e11786248231fbf"
    UNIT_STOPPING = "de5b426a63be47a7b6ac3eaac82e2f6f"
    UNIT_STOPPED = "9d1aaa27d60140bd96365438aad20286"
    UNIT_FAILED = "d9b373ed55a64feb8242e02dbe79a49c"  # carries UNIT_RESULT=
    UNIT_SUCCESS = "7ad2d189f7e94e70a38c781354912448"
    PROCESS_EXIT = "98e322203f7a4ed290d09fe03c09fe15"  # carries EXIT_CODE= and EXIT_STATUS=
    OUT_OF_MEMORY = "fe6faa94e7774663a0da52717891d8ef"
    OOMD_KILL = "d989611b15e44c9dbf31e3c81256e4ed"
    RESTART_SCHEDULED = "5eb03494b6584870a536b337290809b3"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Times are Unix seconds and seconds since boot. `message` is None where journalctl gave null: the field was
    longer than 4096 bytes and the file was written without `--all`."""

    time: float
    message: str | None
    cursor: str = ""
    monotonic: float | None = None
    boot_id: str = ""
    transport: str = ""
    identifier: str = ""
    comm: str = ""
    pid: int | None = None
    unit: str = ""
    invocation: str = ""
    message_id: str = ""
    priority: int = 6
    unit_result: str = ""
    exit_code: str = ""
    exit_status: str = ""
    job_type: str = ""
    job_result: str = ""

    @property
    def from_systemd(self) -> bool:
        return self.pid == 1 and self.transport != "kernel"

    @property
    def from_manager(self) -> bool:
        """By PID 1, or by the manager of a user's own units. Its process name is journald's word, not the sender's."""
        return self.from_systemd or (self.identifier == "systemd" and self.comm == "systemd")

    @property
    def from_kernel(self) -> bool:
        return self.transport == "kernel"
