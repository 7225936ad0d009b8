"""`shardlab view --edit`: serve a page for editing a schedule or a program, and check each version of it.

The server is reachable from this machine only, and answers only requests with its token, a random word in the address
that the command prints. It stores no state of the pages, so a page may be open twice.
"""

from __future__ import annotations

import json
import secrets
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from shardlab.cli.view.editing import Editor, level_editor, level_title, levels
from shardlab.draw.viewer.page import SCRIPTS, page_html

MOST_BYTES = 2_000_000
"""Largest size of a request in bytes."""

EDIT_SCRIPTS = (*SCRIPTS[:-1], "schedule", "edit")

Answer = tuple[int, str, bytes]
"""Status, content type and content of a response."""


class EditServer:
    """Server of one editor, and of the course's exercises on pipelines (levels).

    Args:
        editor: the editor.

    Attributes:
        address: address of the page, with the token.
    """

    def __init__(self, editor: Editor) -> None:
        self.editors: dict[str, Editor] = {"": editor}
        self.token = secrets.token_urlsafe(24)
        self._levels = {entry.name: entry for entry in levels()}
        self._lock, self._context = Lock(), copy_context()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}/{self.token}/"

    def serve(self) -> None:
        """Answer requests until `close`, or Ctrl-C."""
        try:
            self._server.serve_forever(poll_interval=0.1)
        finally:
            for editor in self.editors.values():
                editor.close()

    def close(self) -> None:
        """Stop answering requests."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, content: bytes) -> Answer:
        """Return the answer to a request: the page, the judgement of a text as JSON, or an error."""
        token, slash, resource = path.partition("?")[0].removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(token.encode(), self.token.encode()):
            return _text(403, "the address lacks the token; use the one that shardlab view --edit printed")
        if (method, resource) == ("GET", ""):
            page = page_html(b"", self.editors[""].name, EDIT_SCRIPTS, "connect-src 'self'")
            return 200, "text/html; charset=utf-8", page.encode()
        if (method, resource) == ("POST", "judge"):
            return self._judge(content)
        return _text(404, f"there is no {resource or method} here")

    def _judge(self, content: bytes) -> Answer:
        """Check a text. A request without a text asks for the starting text."""
        try:
            request: Any = json.loads(content)
            level, text = str(request.get("level", "")), request.get("text")
        except (ValueError, AttributeError, RecursionError):
            return _text(400, "the request is no JSON object")
        if text is not None and not isinstance(text, str):
            return _text(400, "the text is no text")
        with self._lock:
            editor = self._context.copy().run(self._editor, level)
            if editor is None:
                return _text(404, f"there is no level {level!r}")
            start = editor.start
            answer = self._context.copy().run(editor.judge, start if text is None else text).as_dict()
        answer |= {
            "start": start,
            "name": editor.name,
            "schedule": editor.is_schedule,
            "text": start if text is None else text,
        }
        answer["levels"] = [{"name": name, "title": level_title(entry)} for name, entry in self._levels.items()]
        return 200, "application/json", json.dumps(answer).encode()

    def _editor(self, level: str) -> Editor | None:
        if level not in self.editors and level in self._levels:
            self.editors[level] = level_editor(self._levels[level])
        return self.editors.get(level)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET", b"")

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if not length.isdigit() or int(length) > MOST_BYTES:
                    self._send(_text(413, f"a request has at most {MOST_BYTES:,} bytes"))
                    return
                self._answer("POST", self.rfile.read(int(length)))

            def _answer(self, method: str, content: bytes) -> None:
                self._send(server.answer(method, self.path, content))

            def _send(self, answer: Answer) -> None:
                status, kind, content = answer
                self.send_response(status)
                headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
                headers |= {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing: the token is part of each address."""

        return Handler


def _text(status: int, sentence: str) -> Answer:
    return status, "text/plain; charset=utf-8", sentence.encode()
