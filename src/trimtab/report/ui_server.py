"""A local web page of all runs: lists them, shows and compares them, and sends what changes as it changes.

It only reads: no request writes anything. Who asks is checked twice: by the name of the host in the request (a page of
another site, led here by a name that points to this machine, has another one), and by a random token, unless the server
listens to this machine alone. A run is asked for by a hash of its path, among those that were found: no path ever comes
from a request.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from trimtab.core.errors import TrimtabError
from trimtab.core.notebook import safe
from trimtab.record.reader import read_run
from trimtab.record.run_list import RunEntry, list_runs, look_at
from trimtab.report.compare import compare_runs
from trimtab.report.compare_view import comparison_html
from trimtab.report.html import to_html
from trimtab.report.run_table import RunRow, row_of

LOOK_S = 1.0
"""Seconds between two looks at the directory."""
JUDGING_SHARE = 20
"""A live run is judged again after this many times as long as that took: at most 5 % of the time goes into it."""
PING_S = 15.0
MAX_LISTENERS = 64
MAX_PAGES = 4
COOKIE = "trimtab_token"
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; frame-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ASSETS = {"/ui.js": "text/javascript; charset=utf-8", "/lists.css": "text/css; charset=utf-8"}
_HTML = "text/html; charset=utf-8"


class _Judged(NamedTuple):
    """A row, of which state of its run it is, and from when on a later state may be judged."""

    stamp: tuple[object, ...]
    row: RunRow
    again_s: float


class Catalogue:
    """The runs of a directory as rows; a run that has not changed since is not judged again."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._rows: dict[Path, _Judged] = {}
        self._folders: dict[str, Path] = {}

    def rows(self) -> list[dict[str, object]]:
        """Every run, the newest first, with the id to ask for it by."""
        with self._lock:
            try:
                entries = list_runs(self.directory)
            except TrimtabError:  # the directory is gone, or not there yet
                entries = []
            self._folders = {run_key(entry.folder): entry.folder for entry in entries}
            return [self._row(entry) for entry in entries]

    def _row(self, entry: RunEntry) -> dict[str, object]:
        stamp, now_s = stamp_of(entry), time.monotonic()
        known = self._rows.get(entry.folder)
        if known is None or (known.stamp != stamp and (now_s >= known.again_s or known.row.state != entry.state.value)):
            row = row_of(entry)
            again_s = time.monotonic() + JUDGING_SHARE * (time.monotonic() - now_s)
            known = self._rows[entry.folder] = _Judged(stamp, row, again_s)
        row = replace(known.row, num_steps=entry.num_steps, size_bytes=entry.size_bytes)
        return {"id": run_key(entry.folder), "size": row.size} | asdict(row)

    def folder(self, key: str) -> Path | None:
        """The run with this id, of those that are there now."""
        if key not in self._folders:
            self.rows()
        return self._folders.get(key)


def run_key(folder: Path) -> str:
    """What a run is asked for by."""
    return hashlib.sha256(str(folder.absolute()).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def stamp_of(entry: RunEntry) -> tuple[object, ...]:
    """Differs where a run has changed."""
    return (entry.lines_bytes, entry.written_s, entry.state.value, entry.problem)


class UiServer(ThreadingHTTPServer):
    """Serves one directory of runs until it is told to stop; `url` is where to look."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, directory: Path | None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.catalogue = Catalogue(directory)
        self.loopback = is_loopback(host)
        self.token = "" if self.loopback else secrets.token_urlsafe(24)
        self.ending = threading.Event()
        self.listeners = threading.BoundedSemaphore(MAX_LISTENERS)
        self.pages = threading.BoundedSemaphore(MAX_PAGES)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the list, with the token where one is needed."""
        host = str(self.server_address[0])
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{name}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")

    def stop(self) -> None:
        """End, and let those go who listen."""
        self.ending.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke is no concern of anybody's; no trace of it on the terminal."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0")
        (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(host: str) -> bool:
    """Whether the host of a request is this machine by a name that no other site can have.

    Example:
        >>> [names_this_machine(h) for h in ("localhost:80", "127.0.0.1", "[::1]:9", "evil.example:80", "")]
        [True, True, True, False, False]
    """
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


@cache
def _asset(name: str) -> str:
    return (files("trimtab.report") / "page" / name).read_text(encoding="utf-8")


class _Handler(BaseHTTPRequestHandler):
    """One request; everything that is not a GET of a known page is refused."""

    server: UiServer
    server_version, sys_version = "trimtab", ""
    timeout = 60.0

    def do_GET(self) -> None:
        """Answer, or say in a line why not."""
        try:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "the address cannot be read")
            return
        if self.server.loopback and not names_this_machine(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "ask for this machine by the name localhost or 127.0.0.1")
        elif not self._is_let_in(query):
            self._refuse(HTTPStatus.UNAUTHORIZED, "open the address that trimtab ui printed: it holds the token")
        elif self.server.token and "token" in query:
            self._remember()
        else:
            try:
                self._route(parts.path, query)
            except (ConnectionError, TimeoutError):
                self.close_connection = True
            except TrimtabError as error:
                self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            except OSError as error:
                self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, f"it cannot be read: {error.strerror or error}")

    def do_HEAD(self) -> None:
        """Only pages are served."""
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered: nothing can be changed here")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD  # noqa: N815  (names of the standard library)

    def _is_let_in(self, query: dict[str, list[str]]) -> bool:
        token = self.server.token
        if not token:
            return True
        given = [*query.get("token", []), self.headers.get("Authorization", "").removeprefix("Bearer ")]
        with suppress(CookieError):
            cookie = SimpleCookie(self.headers.get("Cookie", ""))
            given += [cookie[COOKIE].value] if COOKIE in cookie else []
        return any(hmac.compare_digest(one.encode("utf-8", "replace"), token.encode()) for one in given)

    def _remember(self) -> None:
        """Keep the token in a cookie, so that it stands neither in the address bar nor in any link."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{COOKIE}={self.server.token}; Path=/; HttpOnly; SameSite=Strict")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _route(self, path: str, query: dict[str, list[str]]) -> None:
        kind, _, key = path.removeprefix("/").partition("/")
        if path == "/":
            self._send(_HTML, _asset("ui.html"))
        elif path in _ASSETS:
            self._send(_ASSETS[path], _asset(path.removeprefix("/")))
        elif path == "/api/runs":
            self._send("application/json", json.dumps(self._runs()))
        elif path == "/events":
            self._tell(self._runs)
        elif path == "/compare":
            self._compare(query)
        elif path == "/favicon.ico":
            self._send("image/svg+xml", "<svg xmlns='http://www.w3.org/2000/svg'/>")
        elif kind in ("run", "page", "events") and (folder := self.server.catalogue.folder(key)) is not None:
            self._one_run(kind, folder)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page or run")

    def _one_run(self, kind: str, folder: Path) -> None:
        if kind == "run":
            self._send(_HTML, _asset("ui_run.html"))
        elif kind == "events":
            self._tell(lambda: _state(folder))
        else:
            with self.server.pages:  # a few at a time: one of a long run takes seconds and hundreds of megabytes
                text = to_html(read_run(folder))
            self._send(_HTML, text, policy=None)  # it brings its own, stricter one

    def _runs(self) -> dict[str, object]:
        where = self.server.catalogue.directory
        return {
            "directory": str(where) if where is not None else "./trimtab_runs",
            "runs": self.server.catalogue.rows(),
        }

    def _compare(self, query: dict[str, list[str]]) -> None:
        found = [self.server.catalogue.folder(query.get(name, [""])[0]) for name in ("a", "b")]
        if found[0] is None or found[1] is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such run; choose two in the list")
            return
        with self.server.pages:
            one, other = read_run(found[0], tables=False), read_run(found[1], tables=False)
            text = comparison_html(compare_runs(one, other))
        self._send(_HTML, text, policy=None)

    def _tell(self, look: Callable[[], dict[str, object]]) -> None:
        """Send what is seen now, and again whenever it has changed, until the browser goes away."""
        if not self.server.listeners.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"more than {MAX_LISTENERS} pages are open")
            return
        try:
            self.send_response(HTTPStatus.OK)
            self._send_headers("text/event-stream", POLICY)
            self.end_headers()
            for text in _changes(look, self.server.ending):
                self.wfile.write(text.encode("utf-8", "replace"))
                self.wfile.flush()
        finally:
            self.server.listeners.release()
            self.close_connection = True

    def _send(self, kind: str, text: str, *, policy: str | None = POLICY) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(HTTPStatus.OK)
        self._send_headers(kind, policy)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_headers(self, kind: str, policy: str | None) -> None:
        self.send_header("Content-Type", kind)
        if policy is not None:
            self.send_header("Content-Security-Policy", policy)
        else:
            self.send_header("X-Frame-Options", "SAMEORIGIN")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        page = f"<!doctype html><title>{status.value}</title><p>{safe(why)}</p><p><a href='/'>All runs</a></p>"
        data = page.encode("utf-8", "replace")
        self.send_response(status)
        self._send_headers(_HTML, POLICY)
        self.send_header("Content-Length", str(len(data)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: an address may hold a token, and a terminal is no place for what strangers send."""


def _state(folder: Path) -> dict[str, object]:
    entry = look_at(folder)
    return {"stamp": repr(stamp_of(entry)), "state": entry.state.value, "num_steps": entry.num_steps}


def _changes(look: Callable[[], dict[str, object]], ending: threading.Event) -> Iterator[str]:
    """Events for a browser: each time something else is seen, and a sign of life when nothing is."""
    last, spoke_s = "", time.monotonic()
    while not ending.is_set():
        text = json.dumps(look())
        if text != last or time.monotonic() - spoke_s > PING_S:
            yield f"data: {text}\n\n" if text != last else ": still here\n\n"
            last, spoke_s = text, time.monotonic()
        ending.wait(LOOK_S)
