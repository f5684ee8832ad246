"""The probe of a server against real HTTP servers: healthy, starting, draining, hanging, dying, foreign."""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import TypeVar

import pytest
from aiohttp import web

from sglang_watchdog.host.server import Generated, HealthState, Server, address_of

T = TypeVar("T")
Routes = dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]
LONG_S, SHORT_S = 10.0, 0.2


def ask(routes: Routes, question: Callable[[Server], Awaitable[T]], api_key: str = "") -> T:
    """What `question` answers of a server with these routes; any other path is 404."""

    async def run() -> T:
        application = web.Application()
        application.add_routes([web.route("*", path, handler) for path, handler in routes.items()])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0][:2]
            return await question(Server(f"http://{host}:{port}/", api_key))
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def says(body: object = None, status: int = 200) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=json.dumps(body), content_type="application/json")

    return handler


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def drips_for_ever(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


async def floods(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(200):
        await response.write(b" " * 65536)
    return response


async def hangs_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


# Health


@pytest.mark.parametrize(
    ("handler", "state"),
    [
        (says(), HealthState.UP),
        (says(status=503), HealthState.STARTING),
        (says(status=500), HealthState.UNHEALTHY),
        (says(status=404), HealthState.UNHEALTHY),
        (hangs, HealthState.TIMEOUT),
        (drips_for_ever, HealthState.TIMEOUT),
        (floods, HealthState.UNHEALTHY),
        (hangs_up, HealthState.UNHEALTHY),
    ],
)
def test_health_is_a_value_whatever_the_server_does(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], state: HealthState
) -> None:
    deadline = SHORT_S if state is HealthState.TIMEOUT else LONG_S
    assert ask({"/health": handler}, lambda server: server.health(deadline)) is state


def test_a_port_where_nothing_listens_is_refused() -> None:
    with closing(socket.socket()) as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        server = Server(f"http://127.0.0.1:{placeholder.getsockname()[1]}")
        assert asyncio.run(server.health(LONG_S)) is HealthState.REFUSED
        generated = asyncio.run(server.generate(LONG_S))
        assert generated.tokens == 0
        assert generated.reason


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://no such host:1", "ftp://127.0.0.1:1"])
def test_an_address_that_cannot_be_is_no_exception(url: str) -> None:
    assert asyncio.run(Server(url).health(LONG_S)) in (HealthState.REFUSED, HealthState.UNHEALTHY)


def test_something_that_is_no_http_server_is_unhealthy() -> None:
    async def run() -> HealthState:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail ready\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            return await Server(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").health(LONG_S)

    assert asyncio.run(run()) is HealthState.UNHEALTHY


def test_503_after_the_server_was_up_is_unhealthy_and_not_starting() -> None:
    statuses = [503, 200, 503]

    async def health(_: web.Request) -> web.StreamResponse:
        return web.Response(status=statuses.pop(0))

    async def thrice(server: Server) -> list[HealthState]:
        return [await server.health(LONG_S) for _ in range(3)]

    assert ask({"/health": health}, thrice) == [HealthState.STARTING, HealthState.UP, HealthState.UNHEALTHY]


# Tokens


async def generates(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    count = asked["sampling_params"]["max_new_tokens"]
    assert asked["input_ids"]
    return web.json_response({"output_ids": [5] * count, "meta_info": {"completion_tokens": count}})


async def completes(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    return web.json_response({"choices": [{"text": "x"}], "usage": {"completion_tokens": asked["max_tokens"]}})


def generated(routes: Routes, deadline: float = LONG_S, api_key: str = "") -> Generated:
    return ask(routes, lambda server: server.generate(deadline), api_key)


def test_tokens_are_counted_and_timed() -> None:
    found = generated({"/generate": generates})
    assert found.tokens == 4
    assert 0 < found.seconds < LONG_S
    assert found.reason == ""


def test_a_server_without_generate_is_asked_as_openai_would_be() -> None:
    assert generated({"/v1/completions": completes}).tokens == 4


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        ({}, "HTTP 404"),
        ({"/generate": says(status=500)}, "HTTP 500"),
        ({"/generate": says({"text": "looks like an answer"})}, "no tokens"),
        ({"/generate": says({"meta_info": {"completion_tokens": 0}})}, "no tokens"),
        ({"/generate": says(["a", "list"])}, "no tokens"),
        ({"/generate": hangs_up}, "isconnected"),
    ],
)
def test_no_tokens_are_never_taken_for_some(routes: Routes, reason: str) -> None:
    found = generated(routes)
    assert found.tokens == 0
    assert reason in found.reason


def test_a_dead_scheduler_costs_the_deadline_and_no_more() -> None:
    begun = time.monotonic()
    found = generated({"/generate": hangs}, SHORT_S)
    assert (found.tokens, found.reason) == (0, "no answer within 0.2 s")
    assert SHORT_S <= time.monotonic() - begun < LONG_S


def test_the_key_goes_along_and_a_wrong_one_is_said() -> None:
    async def guarded(request: web.Request) -> web.StreamResponse:
        allowed = request.headers.get("Authorization") == "Bearer secret"
        return await generates(request) if allowed else web.Response(status=401)

    assert generated({"/generate": guarded}, api_key="secret").tokens == 4
    assert generated({"/generate": guarded}).reason == "HTTP 401"


# What it says of itself


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_of_any_release_comes_without_secrets(path: str) -> None:
    info = {"speculative_num_steps": 4, "api_key": "hush", "version": "0.5.16"}
    found = ask({path: says(info)}, lambda server: server.server_info(LONG_S))
    assert found is not None
    assert found["speculative_num_steps"] == 4
    assert "hush" not in str(found)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_of_any_release(path: str) -> None:
    assert ask({path: says({"model_path": "/m"})}, lambda server: server.model_info(LONG_S)) == {"model_path": "/m"}


def test_an_info_that_cannot_be_had_is_none() -> None:
    for routes in ({}, {"/server_info": hangs}, {"/server_info": says(["list"])}, {"/server_info": says({}, 500)}):
        assert ask(dict(routes), lambda server: server.server_info(SHORT_S)) is None


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/loads", {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1}, {"num_running_reqs": 2}]}, None),
        (
            "/v1/loads",
            {"loads": [{"num_running_reqs": n, "num_waiting_reqs": 1} for n in (3, 2)]},
            7,
        ),
        ("/get_load", [{"num_reqs": 3, "num_waiting_reqs": 1}, {"num_reqs": 2, "num_waiting_reqs": 0}], 5),
        ("/get_load", [], None),
        ("/get_load", {"loads": []}, None),
        ("/other", {}, None),
    ],
)
def test_requests_in_flight_are_counted_over_all_ranks_or_not_at_all(
    path: str, body: object, count: int | None
) -> None:
    assert ask({path: says(body)}, lambda server: server.requests_in_flight(LONG_S)) == count


@pytest.mark.parametrize("answer", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[NaN, 1e999]", "\ud800"])
def test_an_answer_that_no_reader_of_json_takes_is_no_answer(answer: str) -> None:
    """A stranger may have the port."""

    async def odd(_request: web.Request) -> web.Response:
        return web.Response(body=answer.encode("utf-8", "surrogatepass"), content_type="application/json")

    assert ask({"/v1/loads": odd}, lambda server: server.requests_in_flight(LONG_S)) is None
    assert ask({"/server_info": odd}, lambda server: server.server_info(LONG_S)) is None


# Where it listens


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ("", ("127.0.0.1", 30000)),
        ("--host 0.0.0.0 --port 8000", ("127.0.0.1", 8000)),
        ("--host=10.0.0.5 --port=8001", ("10.0.0.5", 8001)),
        ("--host :: --port 8000", ("[::1]", 8000)),
        ("--host fd00::5", ("[fd00::5]", 30000)),
        ("--port 8000 --port 9000", ("127.0.0.1", 9000)),
        ("--port $PORT", ("127.0.0.1", 30000)),
    ],
)
def test_the_address_is_what_the_command_says(flags: str, address: tuple[str, int]) -> None:
    assert address_of(("python3", "-m", "sglang.launch_server", *flags.split())) == address


def test_a_request_that_was_taken_and_not_answered_is_told_from_one_that_was_refused() -> None:
    async def generate(server: Server) -> Generated:
        return await server.generate(SHORT_S)

    assert ask({"/generate": hangs}, generate).silent
    assert not ask({"/generate": says({"error": "full"}, 503)}, generate).silent
    with closing(socket.socket()) as placeholder:
        placeholder.bind(("127.0.0.1", 0))  # and does not listen
        port = placeholder.getsockname()[1]
        assert not asyncio.run(Server(f"http://127.0.0.1:{port}").generate(SHORT_S)).silent
