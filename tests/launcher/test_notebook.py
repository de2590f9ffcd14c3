"""cookbook notebook: Jupyter in a small job, with a stand-in for Jupyter itself."""

import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from launcher.executors.slurm import Partition
from launcher.observe import servers
from launcher.recipes.recipe import Resources
from launcher.site import Site
from tests.launcher.kit import Kit, served_by_a_job, until

# Answers with the folder that it serves, to whom has the token.
JUPYTER = """
import http.server, os, sys
options = dict(word.partition("=")[::2] for word in sys.argv)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/?token=" + os.environ["JUPYTER_TOKEN"]
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(options["--ServerApp.root_dir"].encode())
address = options["--ip"], int(options["--port"])
http.server.HTTPServer(address, Handler).serve_forever()
"""


@pytest.mark.long
def test_a_notebook_has_a_token_and_ends_with_its_job(kit: Kit, slurm, tmp_path: Path) -> None:
    program, listening = tmp_path / "jupyter-lab", tmp_path / "listening"
    program.write_text(f"#!{sys.executable}\n{JUPYTER}")
    program.chmod(0o755)

    argv = ["notebook", "--gpus", "1", "--jupyter", str(program), "--folder", str(tmp_path)]
    own = {"COOKBOOK_LISTENING": str(listening)}
    with served_by_a_job(kit, slurm, argv, tmp_path / "log", own) as (queued, log):
        until(listening.is_file, 60, log.read_text)
        host, port, path = listening.read_text().split()
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as answer:
            assert answer.read().decode() == str(tmp_path)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"http://{host}:{port}/?token=other", timeout=10)
        assert queued()


@pytest.mark.parametrize(
    ("limit", "asked", "sent"),
    [
        ("1:00:00", None, "1:00:00"),
        ("infinite", None, "04:00:00"),
        ("2-00:00:00", None, "04:00:00"),
        ("1:00:00", "00:10:00", "00:10:00"),
    ],
)
def test_a_job_asks_for_no_more_than_its_partition_gives(monkeypatch, limit, asked, sent) -> None:
    options: list[str] = []
    monkeypatch.setattr(servers, "attached", lambda given, argv: options.extend(given))
    known = {"a": Partition("a", "7-00:00:00"), "b": Partition("b", limit, default=True)}
    monkeypatch.setattr(servers.slurm, "partitions", lambda hidden: known)
    monkeypatch.setattr(signal, "signal", lambda *each: None)
    site = Site(gpu_request="gres")
    servers.on_node("notebook", [], Resources(time=asked, gpu_type="h100"), site, None, gpus=2)
    assert {f"--time={sent}", "--gres=gpu:h100:2", "--job-name=cookbook-notebook"} <= set(options)
