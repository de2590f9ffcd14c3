"""cookbook track: a real MLflow server, and the files that W&B writes without a network."""

import json
import os
import re
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

# Importing MLflow and W&B takes seconds.
pytestmark = pytest.mark.long


def user_of(root: Path, **environment: str) -> Kit:
    return Kit({**os.environ, "COOKBOOK_ROOT": str(root), **environment}, root)


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
    assert (done.returncode, done.stdout) == (0, f"{run.name}: imported: 9 values\n")
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
        ("wandb", 1, "nobody is logged in: run: wandb login"),
        ("mlfow", 2, "tracking: 'mlfow' is not mlflow, an MLflow server's"),
    ],
)
def test_a_place_that_takes_nothing_is_told(tmp_path, uri, status, words):
    finished_run(tmp_path, 1)
    user = user_of(tmp_path, HOME=str(tmp_path), WANDB_MODE="online", WANDB_API_KEY="")
    done = user.cookbook("track", "--uri", uri)
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr


def records(folder: Path) -> list:
    """What `wandb sync` would upload, in the order in which it was written."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for path in sorted(folder.glob("offline-run-*/*.wandb"), key=os.path.getmtime):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
    return found


def test_wandb_has_each_step_once_with_its_time(tmp_path):
    run, user = finished_run(tmp_path, 1), user_of(tmp_path, WANDB_MODE="offline")

    def track() -> str:
        done = user.cookbook("track", "--uri", "wandb:team/intents")
        assert done.returncode == 0, done.stderr
        assert "wandb sync" in done.stderr
        return done.stdout

    assert re.fullmatch(rf"{run.name}: imported: \d+ values\n", track())
    assert track() == f"{run.name}: is up to date\n"
    lines = (run.path / "metrics.jsonl").read_text().splitlines()[:5]
    row = json.dumps({"step": 6, "time": 6.0, "loss": 0.25})
    (run.path / "metrics.jsonl").write_text("\n".join([*lines, row]) + "\n")
    assert re.fullmatch(rf"{run.name}: updated: \d+ values\n", track())

    found = records(tmp_path / "tracking" / "wandb")
    begun = [each.run for each in found if each.WhichOneof("record_type") == "run"]
    assert {(each.entity, each.project, each.run_id) for each in begun} == {
        ("team", "intents", run.name)
    }
    history = [each.history for each in found if each.WhichOneof("record_type") == "history"]
    steps = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in each.item}
        for each in history
    ]
    assert [(each["_step"], each["loss"], each["_timestamp"]) for each in steps] == [
        *((step, 2.0 / step, step) for step in range(1, 6)),
        (6, 0.25, 6),
    ]
    configs = [each.config for each in found if each.WhichOneof("record_type") == "config"]
    settings = {item.key: json.loads(item.value_json) for each in configs for item in each.update}
    assert settings["optimizer.lr"] == 0.001
    assert settings["cookbook/data"][0]["sha256"] == "d" * 64
