"""The unit file of a simulated SGLang, as an operator writes it.

What steers the simulation lies in a drop-in beside it, so that the file itself holds nothing that a real one would not.
Only text is made here: `lab_product.installed` writes it to a host.
"""

import shlex
from dataclasses import dataclass, field
from enum import StrEnum

from sim_sglang.simulation import Simulation, command

MODEL = "/models/qwen3.5-122b-a10b"
VARIABLE = "SGLANG_SPECULATION_ARGS"
OVERRIDES = "/var/lib/sglang-watchdog/overrides"


class Way(StrEnum):
    """How the operator's file names the speculation flags, which decides how the watchdog can replace them."""

    ENVIRONMENT_FILE = "environment_file"  # a variable in ExecStart=, and the watchdog's own file listed last
    DROP_IN = "drop_in"  # plain flags in ExecStart=


@dataclass(frozen=True)
class SglangUnit:
    """One definition. `steps` None is no speculation; seconds are real ones."""

    name: str
    port: int
    simulation: Simulation
    steps: int | None = 4
    way: Way = Way.DROP_IN
    api_key: str = ""
    flags: tuple[str, ...] = ()
    tp: int = 4
    kill_mode: str = "mixed"
    timeout_stop_s: float = 20.0
    restart: str = "always"
    restart_s: float = 1.0
    start_limit_s: float = 0.0
    wanted_by: str = ""
    wrapper: tuple[str, ...] = ()
    """Words before the server's command, of one that starts it (`podman run …`)."""
    environment: dict[str, str] = field(default_factory=dict)
    service: tuple[str, ...] = ()
    """More lines of [Service]."""

    @property
    def file_path(self) -> str:
        return f"/etc/systemd/system/{self.name}"

    @property
    def simulation_path(self) -> str:
        return f"{self.file_path}.d/10-simulation.conf"

    @property
    def speculation(self) -> tuple[str, ...]:
        if self.steps is None:
            return ()
        names = ("--speculative-algorithm", "--speculative-num-steps", "--speculative-eagle-topk")
        values = ("NEXTN", str(self.steps), "1")
        pairs = [word for pair in zip(names, values, strict=True) for word in pair]
        return (*pairs, "--speculative-num-draft-tokens", str(self.steps + 1))

    def text(self) -> str:
        lines = [
            "[Unit]",
            "Description=SGLang",
            f"StartLimitIntervalSec={self.start_limit_s:g}",
            "",
            "[Service]",
            *self._command(),
            f"KillMode={self.kill_mode}",
            f"TimeoutStopSec={self.timeout_stop_s:g}",
            f"Restart={self.restart}",
            f"RestartSec={self.restart_s:g}",
            *self.service,
        ]
        installed = ["", "[Install]", f"WantedBy={self.wanted_by}"] if self.wanted_by else []
        return "\n".join([*lines, *installed, ""])

    def command_line(self) -> str:
        """ExecStart=, of a unit whose flags are plain words."""
        return self._command()[-1]

    def _command(self) -> list[str]:
        key = ("--api-key", self.api_key) if self.api_key else ()
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        argv = [*self.wrapper, *command("--model-path", MODEL, "--tp-size", str(self.tp), *address, *key, *self.flags)]
        match self.way:
            case Way.DROP_IN:
                return [f"ExecStart={shlex.join((*argv, *self.speculation))}"]
            case Way.ENVIRONMENT_FILE:
                return [
                    f'Environment="{VARIABLE}={shlex.join(self.speculation)}"',
                    f"EnvironmentFile=-{OVERRIDES}/{self.name}.env",
                    f"ExecStart={shlex.join(argv)} ${VARIABLE}",
                ]

    def simulation_text(self) -> str:
        # Compiled files would land in the checkout, which is read-only inside a host and shared by all of them.
        variables = {**self.simulation.environment(), "PYTHONDONTWRITEBYTECODE": "1", **self.environment}
        lines = (f'Environment="{name}={value}"' for name, value in variables.items())
        return "\n".join(["[Service]", *lines, ""])
