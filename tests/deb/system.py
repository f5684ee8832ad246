"""A bare Debian on a lab host, and what an admin does there with the package."""

from dataclasses import dataclass
from pathlib import Path

from deb.package import NAME, Package
from lab.host import LabHost
from lab_product.installed import SERVICE, SETTINGS, InferenceHost, show_cards
from waiting import wait_until

STATE = "/var/lib/sglang-watchdog"
INSTALL_DEADLINE_S = 240.0
MIB = 1024 * 1024
# The package with its compiled files, and what a test writes beside it.
SIZES = {"memory_bytes": 2048 * MIB, "disk_bytes": 1536 * MIB}


@dataclass(frozen=True)
class Debian:
    """`host` runs a root on which nothing of ours was ever installed."""

    host: LabHost

    # -- apt and dpkg, without any network

    def install(self, package: Package, *options: str) -> str:
        """Also another version over one that is there. Returns what was said. Where nobody answers, dpkg wants to be
        told what becomes of a config.toml that both sides changed."""
        return self._apt("install", "-o", "Dpkg::Options::=--force-confold", *options, str(package.path))

    def remove(self) -> str:
        return self._apt("remove", NAME)

    def purge(self) -> str:
        return self._apt("purge", NAME)

    def _apt(self, *words: str) -> str:
        # The service manager is told over sockets in the file system, which need no network.
        apt = ("unshare", "--net", "--", "apt-get", "--yes", "--quiet=2", *words)
        done = self.host.run(*apt, timeout=INSTALL_DEADLINE_S, env={"DEBIAN_FRONTEND": "noninteractive"})
        return done.stdout + done.stderr

    def installed_version(self) -> str:
        """Empty where it is not installed."""
        shown = self.host.run("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", NAME, check=False)
        status, _, version = shown.stdout.partition(" ")
        return version if status == "installed" else ""

    def has(self, command: str) -> bool:
        return self.host.run("sh", "-c", 'command -v "$1"', "has", command, check=False).returncode == 0

    def there(self, *paths: str | Path) -> list[str]:
        """Those of the paths that exist."""
        script = 'for path; do if [ -e "$path" ]; then echo "$path"; fi; done'
        return self.host.run("sh", "-c", script, "there", *paths).stdout.split()

    # -- the service

    def enabled(self) -> set[str]:
        # Its exit status is 1 where there are none.
        wanted = ("list-unit-files", "--state=enabled,enabled-runtime", "--no-legend")
        listed = self.host.systemctl(*wanted, check=False).stdout
        return {line.split()[0] for line in listed.splitlines()}

    def running(self) -> set[str]:
        """Units that are active or were tried; one of them may be failed."""
        listed = self.host.systemctl("list-units", "--all", "--plain", "--no-legend", "--state=active,failed").stdout
        return {line.split()[0] for line in listed.splitlines() if line.split()[0].endswith((".service", ".timer"))}

    def failed(self) -> str:
        return self.host.systemctl("list-units", "--failed", "--no-legend").stdout

    def show_simulated_cards(self) -> None:
        show_cards(self.host)
        self.host.systemctl("daemon-reload")

    def acts_on(self, inference: InferenceHost) -> None:
        """What an admin writes after `setup`: the unit may be acted on. A free port, and a soak that a test can wait
        for."""
        own = f"{SETTINGS.removesuffix('config.toml')}config.d/{inference.unit}.toml"
        text = self.host.read(own)
        assert "\n# act = true\n" in text, text
        self.host.write(own, text.replace("# act = true", "act = true\nsoak = 0.5"))
        edited = self.host.read(SETTINGS) + f"\n[metrics]\nport = {inference.metrics_port}\n"
        self.host.write(SETTINGS, edited)
        self.host.run("sglang-watchdog", "check-config")

    def watches(self, package: Package, inference: InferenceHost) -> None:
        """From nothing to a unit that is watched and may be acted on."""
        self.show_simulated_cards()
        self.install(package)
        self.host.run("sglang-watchdog", "setup")
        self.acts_on(inference)
        self.host.systemctl("enable", "--now", SERVICE)

    def wait_watching(self) -> None:
        """Until the service is up, as after an upgrade."""
        wait_until(lambda: self.host.show(SERVICE, "SubState") == {"SubState": "running"}, 30, "it watches")
