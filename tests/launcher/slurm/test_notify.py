"""Who is told when a run starts, ends or fails: a real server hears what the job posts."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launcher.recipe import load as recipes
from launcher.site import Site, complete
from launcher.slurm.executors import choose
from slurm import notify
from tests.launcher.kit import Kit, project, report, until
from tests.launcher.run.test_script import faults


class Hook(ThreadingHTTPServer):
    """Keeps what is posted; answers with `status`."""

    def __init__(self) -> None:
        self.heard: list[dict] = []
        self.status = 200
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/secret-path"


class Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.heard.append(json.loads(text))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """No line per request."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def webhook(folder: Path, address: str) -> str:
    """The file of a webhook's address."""
    path = folder / "webhook"
    path.write_text(f"{address}\n")
    path.chmod(0o600)
    return str(path)


def test_start_and_end_are_told_in_order_and_the_address_stays_secret(kit: Kit, tmp_path, hook):
    told = {"webhook": webhook(tmp_path, hook.address)}
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.1)\n"
    path = project(tmp_path, wait, notify=told)
    _, run = kit.submit("--recipe", str(path), "--nodes", "1", "--local")
    until(lambda: hook.heard, 60, lambda: report(run))
    (tmp_path / "go").touch()
    kit.wait(run, "COMPLETED", "FAILED")
    until(lambda: len(hook.heard) == 2, 30, lambda: f"{hook.heard}\n{report(run)}")
    first, last = hook.heard
    assert (first["event"], last["event"]) == ("start", "end")
    assert {"run": run.name, "state": "COMPLETED", "attempt": 0}.items() <= last.items()
    assert last["text"].startswith(f"{run.name} (") and "is COMPLETED" in last["text"]
    for file in run.rglob("*"):
        assert not file.is_file() or b"secret-path" not in file.read_bytes(), file


@pytest.mark.long
def test_a_failure_alone_is_told_if_only_failures_are_asked_for(kit: Kit, tmp_path, hook):
    told = {"webhook": webhook(tmp_path, hook.address), "events": ["failure"]}
    path = project(tmp_path, "raise ValueError('no such file')\n", notify=told)
    _, run = kit.submit("--recipe", str(path), "--nodes", "1", "--local")
    kit.wait(run, "COMPLETED", "FAILED")
    (only,) = until(lambda: hook.heard, 30, lambda: report(run))
    assert only["event"] == "failure"
    assert "is FAILED: " in only["text"] and "ValueError: no such file" in only["text"]


def told_of(run_dir: Path, **status: object) -> dict:
    """The facts of a run that has ended."""
    run_dir.mkdir(exist_ok=True)
    record = {"job_id": "7", "state": "FAILED", "message": "rank 1 on n2: Killed", **status}
    (run_dir / "status.json").write_text(json.dumps(record))
    (run_dir / "submission.json").write_text('{"recipe": "demo"}')
    (run_dir / "progress.json").write_text('{"step": 5, "total_steps": 9, "loss_last": 2.5}')
    return notify.facts(run_dir, "ended")


def test_only_the_job_that_wrote_the_state_tells_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = told_of(tmp_path)
    words = f"{tmp_path.name} (demo) is FAILED at step 5 of 9, loss 2.5: rank 1 on n2: Killed"
    assert notify.sentence(found) == words
    assert found["event"] == "failure" and told_of(tmp_path, state="CANCELLED")["event"] == "end"
    assert told_of(tmp_path, job_id="8") == {}
    assert told_of(tmp_path, state="REQUEUED") == {}, "it goes on"


@pytest.mark.parametrize(("status", "heard"), [(404, 1), (503, 2)])
def test_a_server_that_refuses_is_told_and_asked_again_if_that_may_help(hook, status, heard):
    hook.status = status
    assert notify.post(hook.address, {}).startswith(f"the server answered {status}")
    assert len(hook.heard) == heard


def test_an_address_that_cannot_be_reached_is_not_shown():
    told = notify.post("http://127.0.0.1:9/secret-path", {})
    assert "refused" in told and "secret-path" not in told
    for wrong in ("file:///etc/passwd", "slack", ""):
        assert "begins with https://" in notify.post(wrong, {})


def test_the_recipe_comes_before_the_site_and_mail_is_slurms(tmp_path):
    path = project(tmp_path, "pass\n", notify={"mail": "me@example.org", "events": ["end"]})
    site = Site(notify={"mail": "us@example.org", "webhook": "hook"})
    found = complete(recipes.load(str(path)), site, executor=choose(True)).notify
    assert (found.mail, found.mail_types) == ("me@example.org", ["END"])
    assert found.webhook and found.webhook.parts[-3:] == ("slurm-cookbook", "secrets", "hook")


def test_a_webhook_that_others_may_read_is_a_fault(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.write_text("https://example.org\n")
    open_to_all.chmod(0o644)
    path = project(tmp_path, "pass\n", notify={"webhook": str(open_to_all)})
    (found,) = faults(path)
    assert f"notify.webhook: others may read {open_to_all}: chmod 600" in found
    (found,) = faults(path, "notify.webhook=/nowhere/hook")
    assert "notify.webhook: /nowhere/hook does not exist: write the value there with" in found
