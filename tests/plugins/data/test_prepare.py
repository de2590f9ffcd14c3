"""cookbook prepare and cookbook data, as a user types them."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher import yamlfile
from launcher.check import files
from launcher.recipe import load as recipes
from plugins.serve.launcher import from_requests
from tests.launcher.kit import until
from tests.plugins.data.kit import lines, qa
from trainer.data.prepared import by_files

# Two workers and a driver start, and each step takes seconds of the two cores that all share.
SPARK_S = 900
RECIPE = """
sources:
  - path: raw.jsonl
    format: qa
    keep: {quality: number}
steps:
  - filter: quality >= 0.5
  - exact_duplicates
  - split: {train: 0.8, val: 0.2}
"""


@pytest.fixture
def recipe(tmp_path):
    """A recipe file, its data beside it."""
    records = [qa(f"question {n}", f"answer {n % 70}", quality=n % 4 / 3) for n in range(200)]
    lines(tmp_path / "raw.jsonl", records)
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_from_raw_data_to_a_dataset_of_a_recipe(user, recipe, tmp_path):
    plan = user.cookbook("prepare", recipe, "--dry-run")
    assert plan.returncode == 0 and "step    filter: {'where': 'quality >= 0.5'}" in plan.stdout
    preview = user.cookbook("prepare", recipe, "--preview", "--rows", "20")
    assert preview.returncode == 0 and "01-filter: 20 -> 10 rows" in preview.stdout
    assert not user.root.exists()
    done = user.cookbook("prepare", recipe, "--json")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    told = json.loads(done.stdout)
    assert told["rows"] == 100 and set(told["splits"]) == {"train", "val"}
    other = user.cookbook("prepare", recipe, "steps.0.filter=quality >= 0.9", "--name", "strict")
    assert other.returncode == 0, other.stderr
    assert "prepared strict: 50 rows" in other.stdout
    listed = user.cookbook("data", "show")
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [
        ["mine", "100"],
        ["strict", "50"],
    ]
    origin = user.cookbook("data", "show", "mine", "--row", "3")
    assert origin.stdout.strip() == f"{tmp_path}/raw.jsonl, line 3"
    # The set is a dataset of a recipe, which check looks at.
    loaded = recipes.load("demo", ["dataset=prepared:mine@train", "dataset_val=prepared:mine@val"])
    block = loaded.resolved(user.root, "run")["dataset"]
    folder = user.root / "datasets/prepared/mine/current/data/train"
    assert block["data_dir"] == str(folder) and block["packed"] is False
    part = next(folder.glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-1])
    for split, words in (
        ("train", "has changed since it was prepared"),
        ("trian", "does not exist: it has train, val"),
        ("val", ""),
    ):
        found = files._prepared("dataset", folder.with_name(split))
        assert [words in each.line for each in found] == [True] * bool(words)
    shown = user.cookbook("data", "show", "mine").stdout
    assert "step     01-filter                       200 ->          100" in shown
    assert "warning  train: data/train" in shown


def members(group: int) -> bool:
    """Whether a group of processes has members."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_killed_command_leaves_no_folder_in_tmp(user, tmp_path, number):
    """The command is the process that works: a signal ends it, and no other goes on."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    path = tmp_path / "mine.yaml"
    # Some records, and after them more empty lines than can be read in the time of this test.
    records = gzip.compress(b'{"question": "q", "answer": "a"}\n' * 5)
    for name in ("one", "other"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(records + gzip.compress(b"\n" * 10**6) * 9999)
    sources = [{"path": f"{name}.jsonl.gz", "format": "qa"} for name in ("one", "other")]
    path.write_text(yamlfile.dump({"sources": sources, "threads": 2}))
    argv = [sys.executable, "-m", "launcher", "prepare", str(path)]
    env = {**user.env, "TMPDIR": str(temporary)}
    process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, start_new_session=True)
    try:
        folder = user.root / "datasets/prepared/mine/.work"
        until(lambda: list(folder.glob("00-read-*/.tmp-part-*")), 120)
        process.send_signal(number)
        process.wait(60)
        until(lambda: not members(process.pid), 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    left = [each.name for each in temporary.iterdir()]
    if number == signal.SIGTERM:
        assert not left
    # What an engine may spill is removed by the next run, as nothing else can after a KILL.
    assert all(name.startswith("cookbook-duckdb-") for name in left)
    done = subprocess.run([*argv, "--preview", "--rows", "3"], env=env, capture_output=True)
    assert done.returncode == 0 and not list(temporary.iterdir()), done.stderr
    assert b"Warning" not in done.stderr


def test_the_log_of_an_endpoint_becomes_a_training_set(user, tmp_path):
    asked = {"model": "m", "feedback": "", "label": ""}
    log = []
    for n in range(60):
        question = {"role": "user", "content": f"question {n % 40}, mail me{n % 40}@x.org"}
        answer = {"role": "assistant", "content": f"answer {n % 40}"}
        turns = [question, answer]
        log.append({**asked, "request_id": f"r{n}", "time": n, "answer": "", "messages": turns})
    path, file = tmp_path / "requests-helper.yaml", tmp_path / "requests.jsonl"
    from_requests.write(log, file)
    path.write_text(yamlfile.dump(from_requests.data_recipe("helper", file)))
    done = user.cookbook("prepare", str(path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 40
    folder = user.root / "datasets/prepared/requests-helper/current/data/train"
    block = by_files({"_component_": "x", "data_dir": str(folder), "train_on_input": False})
    (shard,) = block["data_files"]
    rows = pq.read_table(shard)["messages"].to_pylist()
    assert all("@x.org" not in turn["content"] for turns in rows for turn in turns)
    assert {turn["role"] for turns in rows for turn in turns} == {"user", "assistant"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["steps.0={filtr: a > 1}"], "there is no step 'filtr' (did you mean filter?)"),
        (["steps.2={split: {train: 0.8, val: 0.1}}"], "must add up to 1; 0.8 + 0.1 = 0.9"),
        (["steps.7.filter=a"], "steps has 3 items, steps.0 to steps.2"),
        (["sources.0.format=qna"], "sources.0.format must be one of"),
        (["engine=duckdb", "--nodes", "2"], "duckdb runs on one node, and 2 are requested"),
        (["--watch"], "without --nodes no job is submitted"),
        (["resources.gpus_per_node=8"], "resources.gpus_per_node is not used"),
        (["sources.0.path=no.jsonl"], "no.jsonl: fix path of the source"),
    ],
)
def test_what_is_wrong_is_one_line(user, recipe, arguments, words):
    done = user.cookbook("prepare", recipe, *arguments)
    assert done.returncode in (1, 2) and words in done.stderr, done.stderr
    assert all(line.startswith(("error: ", "00-read")) for line in done.stderr.splitlines())
    folder = user.root / "datasets" / "prepared" / "mine"
    assert not list(folder.glob("[!.]*"))


@pytest.mark.long
def test_a_job_on_one_node_goes_on_once_its_fault_is_gone(slurm_user, recipe, tmp_path):
    shown = slurm_user.cookbook("prepare", recipe, "--nodes", "1", "--mem", "4G", "--dry-run")
    assert "#SBATCH --mem=4G\n" in shown.stdout and "gpu" not in shown.stdout.lower().replace(
        "# it checks gpus, and no gpu is used", ""
    )
    raw = tmp_path / "raw.jsonl"
    raw.rename(tmp_path / "away.jsonl")
    done = slurm_user.cookbook("prepare", recipe, "--nodes", "1", "--watch")
    assert done.returncode == 1 and "there is no file" in done.stdout + done.stderr
    (run,) = slurm_user.runs()
    attempts = (run / "attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 1, "a retry cannot help"
    changed = slurm_user.cookbook("resume", "last", "memory=2G")
    assert changed.returncode == 2
    assert (
        "was made by cookbook prepare and can only resume unchanged: leave memory=2G out"
        in changed.stderr
    )
    (tmp_path / "away.jsonl").rename(raw)
    again = slurm_user.cookbook("resume", "last", "--watch")
    assert again.returncode == 0 and "COMPLETED" in again.stdout, again.stdout + again.stderr
    assert "mine" in slurm_user.cookbook("data", "show").stdout
    progress = json.loads((run / "progress.json").read_text())
    assert progress["state"] == "finished" and progress["step"] == progress["total_steps"] == 5
    assert "5/5" in slurm_user.cookbook("status").stdout
    finished = slurm_user.cookbook("resume", "last")
    assert finished.returncode == 2 and "is finished, nothing is left to do" in finished.stderr


@pytest.mark.named
def test_spark_on_two_nodes_gives_what_duckdb_gives(slurm_user, recipe):
    """Also if a worker is killed: its tasks run again, and no attempt of the job is lost."""
    pytest.importorskip("pyspark")
    more = ["steps.1=near_duplicates"]
    here = slurm_user.cookbook("prepare", recipe, "--name", "here", *more)
    assert here.returncode == 0, here.stderr
    done = slurm_user.cookbook("prepare", recipe, "memory=600M", "--nodes", "2", *more)
    assert done.returncode == 0, done.stderr
    (run,) = slurm_user.runs()

    # The application has begun once both nodes do tasks for it.
    until(lambda: len(processes(run, "CoarseGrainedExecutorBackend")) >= 2, SPARK_S)
    (worker,) = processes(run, "deploy.worker.Worker", "NODE_RANK=1")
    os.kill(worker, signal.SIGKILL)
    watched = slurm_user.cookbook("watch", "last", "--plain", timeout=SPARK_S)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert len((run / "attempts.jsonl").read_text().splitlines()) == 1
    events = (run / "spark_events").rglob("events*")
    told = "".join(pa.input_stream(path, compression="zstd").read().decode() for path in events)
    lost = "SparkListenerExecutorRemoved" in told
    assert lost, "the event log tells of the killed worker"
    assert "starting another" in (run / "logs" / "0" / "node_1.log").read_text()
    sets = [
        json.loads(slurm_user.cookbook("data", "show", name, "--json").stdout)
        for name in ("here", "mine")
    ]
    assert sets[0]["content_sha256"] == sets[1]["content_sha256"]


def processes(run: Path, program: str, variable: str = "") -> list[int]:
    """The Java processes of a run that run a class of Spark's, of those with a variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text(errors="replace")
            environ = (process / "environ").read_text(errors="replace").split("\0")
        except OSError:
            continue
        # The script that starts a class has its name in its command too.
        ours = f"RUN_DIR={run}" in environ and (not variable or variable in environ)
        if ours and program in command and "java" in command.partition("\0")[0]:
            found.append(int(process.name))
    return found
