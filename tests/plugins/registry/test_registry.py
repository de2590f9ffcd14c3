"""Tracking and the registry in a real MLflow store: import, register, gates, promote, rollback."""

import fcntl
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.do import models
from launcher.errors import CookbookError, GateFault, RecipeFault, StoreFault, UsageFault
from launcher.plugins import hooks
from launcher.run.directory import Run
from launcher.site import Site
from plugins.evaluate.launcher import evaluate, evaluation
from plugins.evaluate.recipe_keys import COMPARED, EVAL
from plugins.registry.launcher import gates, importer, registry, verdicts
from plugins.registry.launcher import promote as workflow
from plugins.registry.launcher import store as stores
from plugins.serve.launcher.endpoint import Deployment, Endpoint
from runspec.states import process_start
from runspec.weights import content_sha256
from tests.launcher.kit import finished_run, model_folder

# Importing MLflow takes seconds.
pytestmark = pytest.mark.long

GATES = """
evaluations:
  suite.answers: {data_sha256: "d1", min_samples: 20, settings: {max_new_tokens: 8}}
gates:
  - metric: suite.answers.f1
    at_least: 0.5
  - metric: suite.answers.f1
    not_worse_than: champion
"""


def evaluated(
    run: Run,
    f1: float,
    against: Path | None = None,
    p: float = 1.0,
    data: str = "d1",
    count: int = 20,
    tokens: int = 8,
) -> None:
    """The files that an evaluation leaves beside a run."""
    export = run.path / "export"
    folder = run.path / "evals"
    folder.mkdir(exist_ok=True)
    number, figures = len(list(folder.glob("*.json"))), {"candidate": {"value": f1}}
    if against is not None:
        figures["difference"] = {"value": f1 - 0.8, "p": p}
    task = {"kind": "generation", "samples": count, "data_sha256": data}
    settings = {key: EVAL[key].default for key in COMPARED} | {"max_new_tokens": tokens}
    result = {
        "suite": "suite",
        "run": f"eval-of-{run.name[-4:]}-{number}",
        "created": float(number),
        "settings": settings,
        "candidate": {"folder": str(export.resolve()), "weights_sha256": content_sha256(export)},
        "against": {"weights_sha256": content_sha256(against)} if against else None,
        "tasks": {"answers": {**task, "settings": {}, "metrics": {"f1": {"all": figures}}}},
    }
    name = f"suite--{number}"
    (folder / f"{name}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("site")
        patch.setenv("COOKBOOK_ROOT", str(root))
        (root / "gates.yaml").write_text(GATES)
        yield Site()


def registered(site: Site, run: Run, name: str, copy: bool = False) -> registry.Version:
    return workflow.register(site, models.resolve(site, run.name), name, copy=copy)


def promote(
    site: Site,
    name: str = "intent",
    to: str = "champion",
    number: int | None = None,
    gates: str | Path | None = "gates.yaml",
    say: Callable[[str], None] = lambda line: None,
    **more: Any,
) -> registry.Version:
    file = site.root / gates if gates else None
    return workflow.promote(site, name, to, number, file, "a reason", say, **more)


def test_a_run_is_imported_once_with_what_it_is_made_of(site):
    run, store = finished_run(site.root, 1), stores.at(site.root)
    with stores.client(store) as client:
        ((_, words),) = importer.import_runs(client, store, [run])
        assert words.startswith("imported")
        assert list(importer.import_runs(client, store, [run])) == [(run.name, "is up to date")]
        tracked = importer.find(client, run.name)
        losses = client.get_metric_history(tracked.info.run_id, "loss")
        (data,) = tracked.inputs.dataset_inputs
    assert tracked.data.params["optimizer.lr"] == "0.001"
    assert [each.value for each in losses] == [2.0 / k for k in range(1, 6)]
    assert tracked.data.metrics["outcome/gpu_hours"] == 0.02
    assert tracked.data.tags["job_ids"] == "local-1" and tracked.info.status == "FINISHED"
    assert (data.dataset.name, data.dataset.digest) == ("train.jsonl", "d" * 36)


def test_a_run_that_ended_is_tracked_where_its_recipe_says(site):
    said: list[str] = []
    run = finished_run(site.root, 9)
    for recipe in ("{}", "tracking: mlflow", "tracking: mlflow"):
        (run.path / "recipe.yaml").write_text(recipe)
        for runs_ended in hooks("runs_ended"):
            runs_ended([Run(run.path)], said.append)
    name = f"tracking: {run.name}"
    assert [line.partition(": 8")[0] for line in said] == [
        f"{name} imported",
        f"{name} is up to date",
    ]


def test_a_run_that_is_half_written_hinders_no_other(site):
    store = stores.at(site.root)
    torn = site.root / "runs" / "20261122-100000-torn-0000"
    torn.mkdir()
    with stores.client(store) as client:
        runs = [Run(torn), finished_run(site.root, 2)]
        done = dict(importer.import_runs(client, store, runs))
    assert "skipped: " in done[torn.name] and done[runs[1].name].startswith("imported")


def test_gates_let_through_or_say_why_and_rollback_goes_back(site):
    first, second = finished_run(site.root, 3), finished_run(site.root, 4)
    evaluated(first, 0.8)
    one = registered(site, first, "intent")
    assert (one.number, one.aliases, one.tags["gpu_hours"]) == (1, ("candidate",), "0.02")
    assert promote(site).number == 1
    two = registered(site, second, "intent", copy=True)
    assert two.folder != second.path / "export" and (two.folder / "config.json").is_file()
    with pytest.raises(GateFault) as error:
        promote(site)
    assert len(error.value.faults) == 1, "both gates lack their figure, said once"
    assert "cookbook eval models:/intent/2 --suite suite" in error.value.faults[0]
    evaluated(second, 0.4, against=first.path / "export", p=0.01)
    with pytest.raises(GateFault) as error:
        promote(site)
    low, worse = error.value.faults
    assert "suite.answers.f1 is 0.4, at least 0.5" in low
    assert "differs from the champion by -0.4 (p 0.01, alpha 0.05)" in worse
    evaluated(second, 0.79, against=first.path / "export", p=0.4)
    two = promote(site)
    # It was evaluated after it was registered.
    assert two.number == 2 and "0.79" in [v for k, v in two.tags.items() if k.startswith("eval.")]
    before, now = workflow.rollback(site, "intent", "champion", "worse in use")
    assert (before, now.number) == (2, 1)
    changes = registry.history(stores.at(site.root), "intent")
    assert [(each["change"], each.get("version")) for each in changes] == [
        ("register", 1),
        ("candidate", 1),
        ("gates", None),
        ("champion", 1),
        ("register", 2),
        ("candidate", 2),
        ("champion", 2),
        ("champion", 1),
    ]
    assert changes[3]["why"] == "a reason" and all(each["user"] for each in changes)
    assert changes[3]["evaluations"] == ["eval-of-aa03-0"]
    assert changes[6]["evaluations"] == ["eval-of-aa04-1"]
    assert [each.get("gates") for each in changes[2:4]] == [str(site.root / "gates.yaml")] * 2


def test_the_gates_of_a_name_judge_its_next_version(site):
    """Also if the file has changed or gone; other gates, or none, have to be named."""
    good, bad = finished_run(site.root, 0), finished_run(site.root, 7)
    file, told = site.root / "own.yaml", []
    file.write_text(GATES)

    def asked(gates: Path | None = None, **more) -> int:
        told.clear()
        return promote(site, "own", gates=gates, say=told.append, **more).number

    evaluated(good, 0.8)
    registered(site, good, "own")
    assert asked(file) == 1 and f"the gates of own are from now on {file}" in told[0]
    file.unlink()
    registered(site, bad, "own")
    with pytest.raises(GateFault, match="own v2 has no evaluation of suite"):
        asked()
    assert told[0] == f"gates of own: {file}"
    endpoint = Endpoint(site.root / "endpoints" / "garden")
    endpoint.folder.mkdir(parents=True)
    serving = Run(site.root / "runs" / "20260102-030405-serve-garden-0a1b")
    serving.path.mkdir()
    job = f"local-{os.getpid()}"
    entry = {"job_id": job, "process_start": process_start(os.getpid())}
    serving.write("submission.json", {"jobs": [entry]})
    serving.write("status.json", {"state": "RUNNING", "job_id": job})
    endpoint.write([Deployment("models:/own@champion", "own v1", runs=[serving.name])])
    assert asked(without=True) == 2 and "no gate is asked this once" in told[0]
    swap = "endpoint garden still serves own v1; swap it with: cookbook serve --keep garden --once"
    assert told[-1] == swap
    last = registry.history(stores.at(site.root), "own")[-1]
    assert (last["change"], last["gates"]) == ("champion", "none")
    endpoint.write([Deployment(str(bad.path / "export"), "own v2", runs=[serving.name])])
    before, _ = workflow.rollback(site, "own", "champion", None)
    (line,) = workflow.still_served(site, "own", "champion", before)
    assert line.endswith("serve models:/own@champion --name garden --replace")


def test_only_the_evaluation_that_a_gate_asks_for_counts(site):
    run = finished_run(site.root, 5)
    registered(site, run, "easy")

    def refused() -> str:
        with pytest.raises(GateFault) as error:
            promote(site, "easy")
        return error.value.faults[0]

    assert "v1 has no evaluation of suite.answers: make it with: cookbook eval " in refused()
    evaluated(run, 1.0, data="d2", count=14)
    assert "(data_sha256 d2); it has 14 samples, fewer than 20" in refused()
    evaluated(run, 1.0, tokens=2)
    assert "max_new_tokens is 2, not 8" in refused()
    evaluated(run, 1.0)
    weights = run.path / "export" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "the weights have changed since" in refused()
    weights.write_bytes(content)
    # A later evaluation of other data hides no earlier one that counts.
    evaluated(run, 1.0, data="d2")
    assert promote(site, "easy").number == 1


def test_a_champion_whose_files_were_replaced_is_no_measure(site):
    """The same folder, registered again with other weights, is not the champion itself."""
    run = finished_run(site.root, 6)
    export = run.path / "export"
    evaluated(run, 0.9)
    registered(site, run, "same")
    promote(site, "same")
    promote(site, "same", to="staging", number=1)
    weights = export / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"w")
    evaluated(run, 0.6, against=export)
    registered(site, run, "same")
    with pytest.raises(GateFault) as error:
        promote(site, "same")
    (fault,) = error.value.faults
    assert f"{export}, the champion, has changed since it was promoted: restore it" in fault
    assert "cookbook promote same --rollback champion" in fault


def test_the_default_gates_ask_for_gates_of_ones_own(site):
    run, told = finished_run(site.root, 8), []
    registered(site, run, "faq")
    assert promote(site, "faq", gates=None, say=told.append).number == 1
    assert told[0].startswith("passed  size")
    assert told[1].startswith("note: no gate has judged the answers")


def test_an_evaluation_is_printed_as_gates(tmp_path):
    run = finished_run(tmp_path, 1)
    evaluated(run, 1.0)
    result = json.loads(next((run.path / "evals").glob("suite--0.json")).read_text())
    path = tmp_path / "gates.yaml"
    gate = "gates: [{metric: suite.answers.f1, at_least: 0.5}]"
    path.write_text("\n".join([*evaluation.as_gates(result), gate]))
    loaded = gates.load(path)
    assert loaded.evaluations == {"suite.answers": gates.Evidence("d1", 20, {"max_new_tokens": 8})}
    version = verdicts.JudgedVersion("own", 1, run.path / "export", [result])
    assert [each.passed for each in verdicts.judge(loaded, version)] == [True]


def test_models_are_found_by_alias_and_version_and_an_unknown_one_is_told(site):
    assert models.resolve(site, "models:/intent@champion").name == "intent v1"
    assert models.resolve(site, "models:/intent/2").name == "intent v2"
    for uri, words in (
        ("models:/intent@champon", "did you mean champion?"),
        ("models:/intents@champion", "no model is registered as 'intents' (did you mean intent?)"),
        ("models:/intent", "is not models:/NAME@ALIAS"),
        ("", "the model's name is empty"),
    ):
        with pytest.raises(UsageFault) as error:
            models.resolve(site, uri)
        assert words in error.value.faults[0]


def test_an_export_that_is_cut_short_is_refused(site):
    folder = model_folder(site.root / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-3])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageFault) as error:
        models.resolve(site, str(folder))
    cut, tokenizer = error.value.faults
    assert "has" in cut and "bytes" in cut and "no tokenizer" in tokenizer


def test_a_store_that_is_locked_or_of_another_version_is_named(site, monkeypatch):
    store = stores.at(site.root)
    monkeypatch.setenv("COOKBOOK_STORE_WAIT_S", "0.3")
    with open(store.folder / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreFault, match="locked by another cookbook command"):
            workflow.rollback(site, "intent", "champion", None)
    other = stores.Store(site.root / "other", f"sqlite:///{site.root / 'other' / 'mlflow.db'}")
    other.folder.mkdir()
    with (
        sqlite3.connect(store.folder / "mlflow.db") as old,
        sqlite3.connect(other.folder / "mlflow.db") as new,
    ):
        old.backup(new)
        new.execute("update alembic_version set version_num = 'ffff'")
    words = "a newer version of MLflow made it"
    with pytest.raises(StoreFault, match=words), stores.client(other) as client:
        registry.names(client)
    with sqlite3.connect(other.folder / "mlflow.db") as new:
        # The first schema of all.
        new.execute("update alembic_version set version_num = '451aebb31d03'")
    words = "an older version of MLflow made it: keep a copy, and run: .*mlflow db upgrade sqlite:"
    with pytest.raises(StoreFault, match=words), stores.client(other) as client:
        registry.names(client)


def test_commands_that_register_at_once_wait_for_each_other(tmp_path, user, monkeypatch):
    """Each waits, says for whom, and leaves nothing if it waits for too long."""
    model_folder(tmp_path / "model")
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    store, model = stores.at(Site().root), models.resolve(Site(), str(tmp_path / "model"))
    argv = [sys.executable, "-m", "launcher", "register", str(tmp_path / "model"), "--as", "many"]
    with stores.locked(store.folder):
        started = [
            subprocess.Popen(argv, env=user.env, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for each in started:
            assert f"waiting for another cookbook command (process {os.getpid()} on " in (
                each.stderr.readline()
            )
        # One copy of the files each, which needed no lock.
        assert len(list((store.models / "many").iterdir())) == 2
        monkeypatch.setenv("COOKBOOK_STORE_WAIT_S", "0")
        with pytest.raises(StoreFault, match="is locked by another cookbook command"):
            workflow.register(Site(), model, "many", copy=False)
        assert len(list((store.models / "many").iterdir())) == 2
    assert [each.wait(timeout=120) for each in started] == [0, 0]
    with stores.client(store, write=False) as client:
        assert [each.number for each in registry.versions(client, "many")] == [2, 1]


def test_faults_of_a_gates_file_are_told_together(tmp_path):
    path = tmp_path / "gates.yaml"
    path.write_text(
        "evaluations: {a.b: {min_samples: 1, settings: {temprature: 1}}}\n"
        "gates:\n  - metrc: a\n  - metric: a.b.c\n  - {metric: a.c.d, at_least: x}\n"
    )
    with pytest.raises(RecipeFault) as error:
        gates.load(path)
    text = "\n".join(error.value.faults)
    for words in (
        "unknown key 'metrc'",
        "needs at_least, at_most",
        "at_least must be a number, got 'x'",
        "data_sha256 is missing",
        "unknown key 'temprature' (did you mean temperature?)",
        "gate 3 is about a.c, and evaluations has no block a.c",
    ):
        assert words in text


def test_a_suite_and_its_models_are_checked_together(site):
    with pytest.raises(CookbookError) as error:
        evaluate.plan(site, "no-such-run", "slurm_qaa", "models:/intent@nobody")
    text = "\n".join(error.value.faults)
    for words in ("no run or model 'no-such-run'", "mean slurm_qa?", "no alias 'nobody'"):
        assert words in text
    with pytest.raises(UsageFault) as error:
        evaluate.plan(site, "models:/intent@champion", "slurm_qa", "bas")
    assert "(did you mean base?): give base, a run, a folder" in error.value.faults[0]
    with pytest.raises(UsageFault, match=r"tasks.answers holds? ?|unknown key"):
        evaluate.plan(
            site, "models:/intent@champion", "slurm_qa", None, ["+tasks.answers.metrcs=[]"]
        )
