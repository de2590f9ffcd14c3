"""A judge with an OpenAI-compatible API, by a rule: python judge.py PORT

It prefers the answer that says what a command does. It stands for a model that you serve
(cookbook serve) or pay for.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HELPFUL = re.compile(r"\b(submits|shows|cancels|starts)\b")


class Judge(BaseHTTPRequestHandler):
    """Answers A, B or T."""

    def do_POST(self) -> None:
        """One request of cookbook eval."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        first, second = re.search(r"Answer A: (.*?)\n\nAnswer B: (.*?)\n\n", text, re.S).groups()
        good = bool(HELPFUL.search(first)), bool(HELPFUL.search(second))
        letter = "T" if good[0] == good[1] else "A" if good[0] else "B"
        content = {"choices": [{"message": {"role": "assistant", "content": letter}}]}
        answer = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
