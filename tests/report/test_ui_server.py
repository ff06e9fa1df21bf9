"""The local web page: what it answers, whom it refuses, and that nothing can be written or reached through it."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.conftest import WriteRun
from trimtab.report.ui_server import UiServer, run_key

EVIL = "<img src=x onerror=alert(1)></script>"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


Ask = Callable[..., Answer]


def started(server: UiServer) -> threading.Thread:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    return thread


def ask_at(server: UiServer, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read().decode())
    finally:
        connection.close()


@pytest.fixture
def server(write_run: WriteRun) -> Iterator[UiServer]:
    """Serves two runs, one of them with names that mean harm; a secret lies beside them."""
    folder = write_run([1.0, 0.5, math.nan, 0.4], name="a").parent
    write_run([1.0, 0.6, 0.4], name=EVIL.replace("/", "_"))
    (folder.parent / "secret.txt").write_text("SECRET")
    found = UiServer(folder)
    started(found)
    yield found
    found.stop()


def test_pages_and_their_policies(server: UiServer) -> None:
    for path in ("/", "/ui.js", "/lists.css", "/api/runs"):
        answer = ask_at(server, path)
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    rows = json.loads(ask_at(server, "/api/runs").text)["runs"]
    assert len(rows) == 2
    for row in rows:
        assert ask_at(server, f"/run/{row['id']}").status == 200
        page = ask_at(server, f"/page/{row['id']}")
        assert page.status == 200
        assert "Content-Security-Policy" in page.text
        assert EVIL not in page.text
    both = ask_at(server, f"/compare?a={rows[0]['id']}&b={rows[1]['id']}")
    assert both.status == 200
    assert "<img" not in both.text


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/page/../../secret.txt",
        "/page/..%2f..%2fsecret.txt",
        "/page/%2e%2e/",
        "/run//etc/passwd",
        "/page/",
        "/events/nothing",
        "/compare?a=../secret.txt&b=x",
        "/compare",
        "/page/\\..\\secret.txt",
        "//etc/passwd",
        "/ui.py",
    ],
)
def test_nothing_else_can_be_read(server: UiServer, path: str) -> None:
    answer = ask_at(server, path)
    assert answer.status == 404
    assert "SECRET" not in answer.text


@settings(max_examples=40)
@given(tail=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40), kind=st.sampled_from("abcd"))
def test_any_address_is_answered(fuzzed: UiServer, tail: str, kind: str) -> None:
    path = {"a": "/", "b": "/page/", "c": "/events/", "d": "/compare?a="}[kind] + tail
    if path.partition("?")[0].partition("#")[0] == "/events":
        return
    answer = ask_at(fuzzed, path)
    assert answer.status in (200, 400, 404)
    assert "SECRET" not in answer.text


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UiServer]:
    folder = tmp_path_factory.mktemp("fuzzed")
    (folder / "secret.txt").write_text("SECRET")
    (folder / "runs").mkdir()
    found = UiServer(folder / "runs")
    started(found)
    yield found
    found.stop()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_nothing_can_be_written(server: UiServer, method: str) -> None:
    assert ask_at(server, "/", method).status == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "0x7f.1"])
def test_another_site_cannot_ask_through_a_browser(server: UiServer, host: str) -> None:
    assert ask_at(server, "/api/runs", Host=host).status == 403


def test_a_token_is_asked_for_where_others_can_reach_it(write_run: WriteRun) -> None:
    server = UiServer(write_run([1.0, 0.5]).parent, "0.0.0.0")
    started(server)
    try:
        assert len(server.token) >= 24
        assert server.token in server.url
        for path in ("/", "/api/runs", "/?token=wrong", "/?token=", "/events", "/ui.js", "/?token=%ff%fe"):
            assert ask_at(server, path).status == 401, path
        entered = ask_at(server, f"/?token={server.token}")
        assert (entered.status, entered.headers["Location"]) == (303, "/")
        cookie = entered.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask_at(server, "/api/runs", Cookie=cookie.partition(";")[0]).status == 200
        assert ask_at(server, "/api/runs", Authorization=f"Bearer {server.token}").status == 200
        assert ask_at(server, "/api/runs", Cookie="\x01=;;;=").status == 401
    finally:
        server.stop()


def read_event(stream: http.client.HTTPResponse) -> dict[str, object]:
    while True:
        line = stream.readline()
        assert line, "the stream ended"
        if line.startswith(b"data: "):
            found: dict[str, object] = json.loads(line.removeprefix(b"data: "))
            return found


def test_changes_are_sent_as_they_come(server: UiServer, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.report.ui_server.LOOK_S", 0.05)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request("GET", "/events")
    stream = connection.getresponse()
    assert stream.getheader("Content-Type") == "text/event-stream"
    assert len(read_event(stream)["runs"]) == 2  # type: ignore[arg-type]
    write_run([1.0], name="new")
    seen = read_event(stream)
    while len(seen["runs"]) < 3:  # type: ignore[arg-type]
        seen = read_event(stream)
    connection.close()


def test_a_broken_run_is_a_row_and_a_message(server: UiServer, write_run: WriteRun) -> None:
    folder = write_run([1.0], name="broken")
    (folder / "run.jsonl").write_text('{"t":"run","seq":0,"format":"trimtab","version":[99,0]}\n')
    rows = json.loads(ask_at(server, "/api/runs").text)["runs"]
    assert any("upgrade trimtab" in row["verdict"] for row in rows)
    answer = ask_at(server, f"/page/{run_key(folder)}")
    assert answer.status == 422
    assert "upgrade trimtab" in answer.text


def test_noise_on_the_wire_harms_nobody(server: UiServer, capfd: pytest.CaptureFixture[str]) -> None:
    for noise in (b"\x00\xff\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"G" * 70_000, b""):
        with socket.create_connection(server.server_address[:2], timeout=20) as plug:
            plug.sendall(noise)
            plug.shutdown(socket.SHUT_WR)
            try:
                while plug.recv(65536):
                    pass
            except ConnectionError:
                continue
    assert ask_at(server, "/").status == 200
    assert capfd.readouterr().err == ""


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    server = UiServer(tmp_path / "later")
    started(server)
    try:
        assert json.loads(ask_at(server, "/api/runs").text)["runs"] == []
    finally:
        server.stop()
