"""Hooks: what they are told, that a bad receiver costs the daemon nothing, and that each failure is counted."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import aiohttp.web
import pytest

from sglang_watchdog.domain.failure import FailureClass
from sglang_watchdog.domain.incident import Incident, Outcome, Step
from sglang_watchdog.reporting.hooks import Event, Hooks, Message
from sglang_watchdog.reporting.metrics import Metrics
from sglang_watchdog.settings import HookSettings

UNIT = "sglang.service"
SECRET = "hf_" + "A" * 34
INCIDENT = Incident(
    "c8b047994eb7",
    UNIT,
    "a" * 32,
    1.0,
    FailureClass.KV_CACHE_OOM,
    f"died beside --api-key {SECRET}",
    Outcome.HELD,
    2.0,
    (Step.HOLD,),
    reason=f"HF_TOKEN={SECRET}",
    diagnosis={"evidence": [{"text": f"argv: --api-key={SECRET}"}], "effective": {"api_key": SECRET}},
)
DEADLINE_S = 30.0


def counted(metrics: Metrics, hook: str, result: str) -> float | None:
    labels = {"hook": hook, "result": result}
    return metrics.registry.get_sample_value("sglang_watchdog_hook_deliveries_total", labels)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def told(settings: HookSettings, hook: str, result: str, times: int = 1) -> Metrics:
    """Tells one incident `times` times and waits until one delivery had that result."""
    metrics = Metrics((UNIT,), "0.1.0")
    hooks = Hooks(settings, metrics)
    hooks.start()
    for _ in range(times):
        hooks.tell(Event.CLOSED, INCIDENT)
    await until(lambda: bool(counted(metrics, hook, result)))
    await hooks.close()
    return metrics


def script(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "hook"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return (str(path), str(folder))


def test_a_command_gets_the_incident_as_json_and_in_variables(tmp_path: Path) -> None:
    command = script(tmp_path, 'cat >"$1/body"; echo "$SGLANG_WATCHDOG_OUTCOME $SGLANG_WATCHDOG_CLASS" >"$1/short"')
    asyncio.run(told(HookSettings(command=command), "command", "delivered"))
    body = json.loads((tmp_path / "body").read_text())
    assert (body["event"], body["incident"], body["unit"]) == ("closed", INCIDENT.id, UNIT)
    assert (body["class"], body["outcome"], body["steps"]) == ("kv_cache_oom", "held", ["hold"])
    assert (tmp_path / "short").read_text() == "held kv_cache_oom\n"


def test_no_secret_goes_out_and_the_size_is_bounded() -> None:
    message = Message.of(Event.OPENED, INCIDENT)
    assert SECRET not in message.body.decode() + str(message.variables)
    assert "REDACTED" in message.body.decode()
    long = Incident("1" * 12, UNIT, "a" * 32, 1.0, FailureClass.UNKNOWN, "", diagnosis={"evidence": ["x" * 100_000]})
    assert len(Message.of(Event.OPENED, long).body) < 64 * 1024
    json.loads(Message.of(Event.OPENED, long).body)


def test_a_command_that_fails_is_tried_again(tmp_path: Path) -> None:
    command = script(tmp_path, 'cat >/dev/null; echo >>"$1/tries"; [ "$(wc -l <"$1/tries")" = 2 ]')
    asyncio.run(told(HookSettings(command=command, retries=1), "command", "delivered"))
    assert (tmp_path / "tries").read_text() == "\n\n"


@pytest.mark.parametrize(
    "text", ["exit 3", "exec sleep 600", 'sleep 600 & echo $! >"$1/child"; exit 4'], ids=["status", "hang", "child"]
)
def test_a_command_that_never_works_is_given_up_with_all_that_it_started(tmp_path: Path, text: str) -> None:
    settings = HookSettings(command=script(tmp_path, text), retries=0, timeout=1.0)
    metrics = asyncio.run(told(settings, "command", "failed"))
    assert counted(metrics, "command", "delivered") == 0
    child = tmp_path / "child"
    if child.exists():
        assert gone(int(child.read_text()))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_command_that_is_missing_is_a_failure() -> None:
    asyncio.run(told(HookSettings(command=("/nonexistent",), retries=0), "command", "failed"))


def test_what_does_not_fit_is_dropped_and_telling_never_waits(tmp_path: Path) -> None:
    settings = HookSettings(command=script(tmp_path, "exec sleep 600"), retries=0, timeout=1.0)
    metrics = asyncio.run(told(settings, "command", "dropped", times=200))
    assert (counted(metrics, "command", "dropped") or 0) >= 200 - 65


def test_without_settings_nothing_is_told() -> None:
    async def tell() -> None:
        hooks = Hooks(HookSettings(), Metrics((UNIT,), "0.1.0"))
        hooks.start()
        hooks.tell(Event.CLOSED, INCIDENT)
        await hooks.close()

    asyncio.run(tell())


def test_a_webhook_gets_the_incident_with_its_token_after_a_failure(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("q7token\n")
    seen: list[tuple[str | None, str]] = []

    async def receive(request: aiohttp.web.Request) -> aiohttp.web.Response:
        seen.append((request.headers.get("Authorization"), (await request.json())["incident"]))
        return aiohttp.web.Response(status=503 if len(seen) == 1 else 204)

    async def serve() -> None:
        runner, port = await server(receive)
        url = f"http://127.0.0.1:{port}/alerts?key=q7secret"
        await told(HookSettings(webhook=url, webhook_token_file=token, retries=1), "webhook", "delivered")
        await runner.cleanup()

    asyncio.run(serve())
    assert seen == [("Bearer q7token", INCIDENT.id)] * 2


async def server(
    receive: Callable[[aiohttp.web.Request], "asyncio.Future[aiohttp.web.Response]"] | object,
) -> tuple[aiohttp.web.AppRunner, int]:
    app = aiohttp.web.Application()
    app.router.add_post("/{path:.*}", receive)  # type: ignore[arg-type]
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, int(runner.addresses[0][1])


@pytest.mark.parametrize("status", [302, 400, 500])
def test_any_answer_but_2xx_is_a_failure_and_no_redirect_is_followed(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    async def receive(request: aiohttp.web.Request) -> aiohttp.web.Response:
        seen.append(request.path)
        return aiohttp.web.Response(status=status, headers={"Location": "/elsewhere"})

    async def serve() -> None:
        runner, port = await server(receive)
        url = f"http://127.0.0.1:{port}/alerts?key=q7secret"
        await told(HookSettings(webhook=url, retries=0), "webhook", "failed")
        await runner.cleanup()

    asyncio.run(serve())
    assert seen == ["/alerts"]
    logged = "".join(capsys.readouterr())
    assert f"answered {status}" in logged
    assert "q7secret" not in logged


def test_a_webhook_that_nobody_serves_is_a_failure_without_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    settings = HookSettings(webhook="http://127.0.0.1:9/q7secret", retries=0)
    asyncio.run(told(settings, "webhook", "failed"))
    assert "q7secret" not in "".join(capsys.readouterr())


def test_a_hook_is_the_first_to_go_where_memory_runs_out(tmp_path: Path) -> None:
    """The command reads its own score once it was given its body, which comes after the score."""
    command = script(tmp_path, 'cat >/dev/null; cat /proc/self/oom_score_adj >"$1/score"')
    asyncio.run(told(HookSettings(command=command), "command", "delivered"))
    assert (tmp_path / "score").read_text() == "1000\n"
