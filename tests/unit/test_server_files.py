"""A server's files are read where they may hang: the answer comes in bounded time, and "unknown" is said."""

import asyncio
import os
import time
from pathlib import Path

from sglang_watchdog.host.model import model_digest
from sglang_watchdog.host.server_files import ServerFilesReader

HANGS_S = 3.0


def server(model: Path, venv: Path) -> tuple[str, ...]:
    return (str(venv / "bin/python"), "-m", "sglang.launch_server", "--model-path", str(model))


def test_the_models_content_and_sglangs_version_are_read(tmp_path: Path) -> None:
    model, venv = tmp_path / "model", tmp_path / "venv"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (venv / "lib/python3.11/site-packages/sglang-0.5.16.dist-info").mkdir(parents=True)
    found = asyncio.run(ServerFilesReader().read(server(model, venv), 30.0))
    assert (found.model_digest, found.version, found.unknown) == (model_digest(str(model)), "0.5.16", "")
    assert found.model_digest


def test_a_disk_that_hangs_is_unknown_and_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # opening it waits for a writer, who never comes

    async def read() -> float:
        begun = time.monotonic()
        reader = ServerFilesReader()
        asked = asyncio.create_task(reader.read(server(tmp_path, tmp_path), HANGS_S))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0.05)
            turns += 1
        assert turns > 5, "the loop stood still"
        assert (asked.result().model_digest, "hangs on the server's files" in asked.result().unknown) == (None, True)
        return time.monotonic() - begun

    assert asyncio.run(read()) < HANGS_S + 20
