"""One journal entry, whatever it was read from."""

from enum import StrEnum
from typing import NamedTuple


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


# Every field that is read. journalctl is asked for no other, which saves it and us half of the work.
FIELDS = (
    *("MESSAGE", "MESSAGE_ID", "_TRANSPORT", "SYSLOG_IDENTIFIER", "_COMM", "_PID", "UNIT", "USER_UNIT"),
    *("_SYSTEMD_UNIT", "_SYSTEMD_USER_UNIT", "INVOCATION_ID", "USER_INVOCATION_ID", "_SYSTEMD_INVOCATION_ID"),
    *("UNIT_RESULT", "EXIT_CODE", "EXIT_STATUS"),
)


class JournalEntry(NamedTuple):
    """`time` is in Unix seconds, 0 where it is not known. `message` is None where journalctl gave null: the field was
    longer than 4096 bytes and the file was written without `--all`. A tuple, because a journal has millions of them."""

    time: float
    message: str | None
    cursor: str = ""
    transport: str = ""
    identifier: str = ""
    comm: str = ""
    pid: int | None = None
    unit: str = ""
    invocation: str = ""
    message_id: str = ""
    unit_result: str = ""
    exit_code: str = ""
    exit_status: str = ""

    @property
    def from_manager(self) -> bool:
        """By PID 1, or by the manager of a user's own units. Its process name is journald's word, not the sender's."""
        if self.pid == 1 and self.transport != "kernel":
            return True
        return self.identifier == "systemd" and self.comm == "systemd"

    @property
    def from_kernel(self) -> bool:
        return self.transport == "kernel"
