"""cookbook track: a real MLflow server."""

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.do import models
from launcher.site import Site
from plugins.registry.launcher import promote as workflow
from tests.launcher.kit import Kit, finished_run, until

# Importing MLflow takes seconds.
pytestmark = pytest.mark.long


def user_of(root: Path) -> Kit:
    return Kit({**os.environ, "COOKBOOK_ROOT": str(root)}, root)


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--serve-artifacts"]
    where = ["--artifacts-destination", str(tmp_path / "files"), "--workers", "1"]
    argv = [str(Path(sys.prefix) / "bin" / "mlflow"), "server", *store, *where]
    with open(tmp_path / "server.log", "w") as log:
        host, _, port = address.partition(":")
        process = subprocess.Popen([*argv, "--host", host, "--port", port], stdout=log, stderr=log)

    def answers() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/health", timeout=5):
            return True
        return False

    try:
        until(answers, 120, (tmp_path / "server.log").read_text)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def test_a_server_has_the_run_with_its_files_and_is_the_registry(server, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    run, user = finished_run(tmp_path, 1), user_of(tmp_path)
    done = user.cookbook("track", "--uri", server)
    assert (done.returncode, done.stdout) == (0, f"{run.name}: imported: 8 values\n")
    client = MlflowClient(server)
    (tracked,) = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    losses = {
        each.step: each.value for each in client.get_metric_history(tracked.info.run_id, "loss")
    }
    assert losses == {step: 2.0 / step for step in range(1, 6)}
    assert tracked.data.params["optimizer.lr"] == "0.001"
    assert "recipe.yaml" in {each.path for each in client.list_artifacts(tracked.info.run_id)}
    assert user.cookbook("track", "--uri", server).stdout == f"{run.name}: is up to date\n"
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path))
    (tmp_path / "gates.yaml").write_text("gates: [{size_gib_at_most: 1}]\n")
    site, told = Site(tracking=server), []
    workflow.register(site, models.resolve(site, run.name), "intent", copy=False)
    gates = tmp_path / "gates.yaml"
    assert workflow.promote(site, "intent", "champion", None, gates, "", told.append).number == 1
    assert client.get_model_version_by_alias("intent", "champion").tags["run"] == run.name
    assert models.resolve(site, "models:/intent@champion").run.name == run.name


@pytest.mark.parametrize(
    ("uri", "status", "words"),
    [
        ("http://127.0.0.1:9", 1, "the MLflow server http://127.0.0.1:9: it does not answer"),
        ("mlfow", 2, "tracking: 'mlfow' is not mlflow, or an MLflow server's"),
    ],
)
def test_a_place_that_takes_nothing_is_told(tmp_path, uri, status, words):
    finished_run(tmp_path, 1)
    done = user_of(tmp_path).cookbook("track", "--uri", uri)
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr
