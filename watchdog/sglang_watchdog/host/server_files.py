"""What the files of a server say of it: its model's content and SGLang's version.

They may lie on a file system that does not answer (NFS), where a read ends for no signal. So a helper process reads
them, which can be abandoned: its silence is "unknown".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_watchdog.domain.speculation import Command
from sglang_watchdog.host.gpu import NoAnswer, ProbeWorker

# A weight index of some MB from a disk that was just spun up; a launch that needs longer for it is not near ready.
READ_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """See `host.model`. `model_digest` is None where it could not be read in time, and `unknown` says why."""

    model_digest: str | None
    version: str = ""
    unknown: str = ""


class ServerFilesReader:
    """Asks a helper of its own: one that hangs on a disk says nothing about the driver. No helper stays."""

    def __init__(self) -> None:
        self._helper = ProbeWorker("on the server's files")

    async def read(self, argv: Sequence[str], deadline: float = READ_DEADLINE_S) -> ServerFiles:
        """Of the server with this command. `deadline` in seconds, the helper's start included."""
        command = Command.parse(argv)
        model = command.value("--model-path") or command.value("--model") or ""
        request: dict[str, object] = {"do": "server_files", "model": model, "interpreter": argv[0]}
        try:
            answer = await self._helper.ask(request, deadline)
        except NoAnswer as why:
            return ServerFiles(None, unknown=str(why))
        finally:
            await self._helper.close()
        return ServerFiles(answer["model_digest"], answer["version"])
