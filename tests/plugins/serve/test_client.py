"""The HTTP client: answers of any status, a Unix socket, no proxy within the cluster."""

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from plugins.serve import client


class Echo(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        self.send_response(int(self.path.rpartition("/")[2]))
        self.end_headers()
        self.wfile.write(json.dumps([self.command, self.headers["Key"], body]).encode())

    do_GET = do_POST

    def address_string(self) -> str:
        return "local"

    def log_message(self, *words: object) -> None:
        """No line per request."""


class OnSocket(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.mark.parametrize("unix", [False, True])
def test_answers_of_any_status(tmp_path, monkeypatch, unix):
    # Nobody listens there: within the cluster it must not be asked.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    path = tmp_path / "s" if unix else None
    server = OnSocket(str(path), Echo) if unix else ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = "http://engine" if unix else client.at(*server.server_address)
    try:
        for status, body, method in [
            (200, {"a": 1}, "POST"),
            (503, None, "GET"),
            (404, {}, "POST"),
        ]:
            answer = client.send(
                f"{url}/{status}", body, {"Key": "k"}, timeout_s=30, unix_socket=path
            )
            text = "" if body is None else json.dumps(body)
            assert (answer.status, json.loads(answer.body)) == (status, [method, "k", text])
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(OSError):
        client.send(f"{url}/200", timeout_s=30, unix_socket=path)
