"""cookbook sweep: a file's cells, their predictions, and their runs."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from launcher.errors import CookbookError
from launcher.recipe import sweep
from launcher.run import sweeps
from launcher.run.directory import Run
from runspec.files import read_json_lines
from tests.launcher.kit import Kit, project, report, until

NAME = "20260102-030405-study-0a1b"
# One cell trains, one has no memory, one fails until a file is there.
SCRIPT = """
import os, sys, time, yaml
from pathlib import Path
kind = yaml.safe_load(Path(os.environ["COOKBOOK_PARAMETERS"]).read_text())["kind"]
root = Path(os.environ["RUN_DIR"]).parents[1]
with open(root / "times", "a") as file:
    file.write(f"{kind} begins\\n")
if kind == "large":
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1e15")
if kind == "late" and not (root / "ready").exists():
    raise ValueError("not ready")
with open(root / "times", "a") as file:
    file.write(f"{kind} ends\\n")
"""


def written(folder: Path, **content: object) -> str:
    path = folder / "study.yaml"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_grid_is_every_combination_and_names_say_what_differs(tmp_path):
    methods = {"full": None, "lora": {"model.lora_rank": 8, "~custom": None}}
    grid = {"method": methods, "optimizer.lr": [1e-3, "1e-4"]}
    cells = sweep.load(written(tmp_path, recipe="demo", set={"epochs": 2}, grid=grid)).cells
    assert [cell.name for cell in cells] == [
        "full, lr=0.001",
        'full, lr="1e-4"',
        "lora, lr=0.001",
        'lora, lr="1e-4"',
    ]
    assert cells[0].overrides == ("epochs=2", "optimizer.lr=0.001")
    assert cells[2].overrides == ("epochs=2", "model.lora_rank=8", "~custom", "optimizer.lr=0.001")


def test_every_fault_of_a_file_is_told_at_once(tmp_path):
    path = written(tmp_path, paralel=3, parallel=0, list=[{"set": {}}])
    with pytest.raises(CookbookError) as caught:
        sweep.load(path)
    text = "\n".join(caught.value.faults)
    for words in (
        "'paralel' (did you mean parallel?)",
        "recipe is missing",
        "got 0",
        "cell 0: name is missing",
    ):
        assert words in text
    assert all(path in fault for fault in caught.value.faults) and len(caught.value.faults) == 4
    with pytest.raises(CookbookError, match="two cells are named 'a'"):
        sweep.load(written(tmp_path, recipe="demo", list=[{"name": "a"}, {"name": "a"}]))
    with pytest.raises(CookbookError, match="did you mean one_gpu"):
        sweep.load("one_gpus")


def test_words_name_a_sweep_or_a_run(tmp_path):
    made = [Run(tmp_path / "runs" / sweeps.run_name(NAME, number)) for number in (0, 9, 10, 100)]
    other = Run(tmp_path / "runs" / "20260102-030406-other-01-0a1b")
    for run in (*made, other):
        run.path.mkdir(parents=True)
        run.write("submission.json", {"sweep": NAME} if run in made else {})
    assert made[1].name == "20260102-030405-study-09-0a1b"
    assert sweeps.find(tmp_path, "study") == made == sweeps.runs_of(tmp_path, [NAME])
    # A part of a run's name, and "last", mean a run.
    assert sweeps.runs_of(tmp_path, ["study-09", "study"]) == [made[1], made[0], *made[2:]]
    assert sweeps.runs_of(tmp_path, ["last", "other"]) == [other]
    with pytest.raises(CookbookError, match="no run in"):
        sweeps.runs_of(tmp_path, ["nothing"])
    with pytest.raises(CookbookError, match="no sweep is named 'other'"):
        sweeps.find(tmp_path, "other")


@pytest.fixture
def study(tmp_path) -> str:
    """A sweep over a script: one run ends, one has no memory, one fails."""
    path = project(tmp_path, SCRIPT, parameters={"kind": "none"}, node_check=False)
    kinds = {"parameters.kind": ["small", "large", "late"]}
    one = {"resources.nodes": 1}
    return written(path.parent, recipe=str(path), parallel=1, set=one, grid=kinds)


def started(user: Kit, path: str) -> str:
    """The name of a sweep that was started."""
    begun = user.cookbook("sweep", path)
    assert begun.returncode == 0, begun.stderr
    return re.match(r"submitted (\S+): 3 runs, at most 1 concurrently", begun.stdout)[1]


def states(user: Kit, name: str) -> list[str]:
    done = user.cookbook("status", name, "--json")
    assert done.returncode == 0, done.stderr
    return [row["state"] for row in json.loads(done.stdout)]


@pytest.mark.long
def test_a_sweep_runs_one_at_a_time_and_is_resumed_where_it_failed(slurm_user: Kit, slurm, study):
    user = slurm_user
    shown = user.cookbook("sweep", study, "--dry-run")
    assert (
        "3 jobs, at most 1 concurrently" in shown.stdout and "cannot be estimated" in shown.stdout
    )
    assert user.runs() == []
    name = started(user, study)
    runs = [run.path for run in sweeps.find(user.root, name)]
    ended = ["COMPLETED", "OUT_OF_MEMORY", "FAILED"]
    until(lambda: states(user, name) == ended, 90, lambda: "\n".join(map(report, runs)))
    # One at a time, in order, and no second try for the one without memory.
    seen = (user.root / "times").read_text().splitlines()
    assert seen == ["small begins", "small ends", "large begins", "late begins"]
    assert [line["cause"] for line in read_json_lines(runs[1] / "attempts.jsonl")] == [
        "out_of_memory"
    ]
    (user.root / "ready").touch()
    again = user.cookbook("sweep", "--resume", "study")
    assert again.returncode == 0 and f"resumed {name}: 1 run," in again.stdout, again.stderr
    until(lambda: states(user, name)[2] == "COMPLETED", 60, lambda: report(runs[2]))
    assert (user.root / "times").read_text().splitlines()[4:] == ["late begins", "late ends"]
    left = user.cookbook("sweep", "--resume", "study")
    assert left.returncode == 2 and "every run of" in left.stderr
    table = user.cookbook("results", "study", "--json")
    assert {row["cell"]: row["state"] for row in json.loads(table.stdout)} == {
        "kind=small": "COMPLETED",
        "kind=large": "OUT_OF_MEMORY",
        "kind=late": "COMPLETED",
    }


def test_what_waits_of_a_sweep_is_cancelled_by_its_name(slurm_user: Kit, slurm, study):
    user = slurm_user
    slurm.run(["scontrol", "update", "partitionname=gpu", "state=down"])
    try:
        started(user, study)
        assert states(user, "study") == ["PENDING"] * 3
        done = user.cookbook("cancel", "study")
        assert done.returncode == 0 and done.stdout.count("cancelled 2") == 3, done.stderr
        assert states(user, "study") == ["CANCELLED"] * 3
    finally:
        slurm.run(["scontrol", "update", "partitionname=gpu", "state=up"])


def test_faults_of_cells_are_told_once_and_nothing_is_left(user: Kit, study):
    done = user.cookbook("sweep", study, "--local", "entry=script:missing.py")
    assert done.returncode in (1, 2) and done.stderr.count("missing.py") == 1, done.stderr
    assert "all cells: " in done.stderr and user.runs() == []
    wrong = user.cookbook("sweep", study, "parameters.kind=[")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr


def killed_sweep(user: Kit, folder: Path, program: str, pattern: str) -> None:
    """Start a sweep that is killed when it calls a program so for the third time."""
    calls, tools = folder / "calls", folder / "bin"
    tools.mkdir()
    real = shutil.which(program, path=user.env["PATH"])
    (tools / program).write_text(
        f'#!/bin/bash\ncase "$*" in {pattern}) echo >>{calls} ;; esac\n'
        f'[ -e {calls} ] && [ "$(wc -l <{calls})" -ge 3 ] && kill -KILL $PPID && exit\n'
        f'exec {real} "$@"\n'
    )
    (tools / program).chmod(0o755)
    script = project(folder, "print('trains')\n")
    cells = [{"name": f"k{n}", "set": {"resources.time": f"{n}"}} for n in range(10, 15)]
    path = folder / "study.yaml"
    path.write_text(json.dumps({"recipe": str(script), "list": cells}))
    env = {**user.env, "PATH": f"{tools}:{user.env['PATH']}"}
    done = Kit(env, user.root).cookbook("sweep", str(path), "--nodes", "1")
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_sweep_killed_before_all_its_runs_are_made_says_so(slurm_user: Kit, tmp_path):
    killed_sweep(slurm_user, tmp_path, "git", "*rev-parse*")
    (run,) = (slurm_user.root / "runs").glob("[!.]*")
    state = slurm_user.status(run)
    assert state["state"] == "PENDING", state
    resume = state["detail"].partition("start it with: cookbook ")[2].split()
    done = slurm_user.cookbook(*resume)
    assert done.returncode == 0 and "has 1 of its 5 runs" in done.stderr, done.stderr
    assert slurm_user.cookbook("cancel", run.name).returncode == 0


def test_a_sweep_killed_while_it_starts_its_jobs_is_resumed(slurm_user: Kit, slurm, tmp_path):
    slurm.run(["scontrol", "update", "partitionname=gpu", "state=down"])
    try:
        killed_sweep(slurm_user, tmp_path, "sbatch", "*--parsable*")
        runs = sweeps.find(slurm_user.root, "study")
        assert [bool(run.all_jobs) for run in runs] == [True, True, False, False, False]
        done = slurm_user.cookbook("sweep", "--resume", "study")
        assert done.returncode == 0 and ": 3 runs, at most 4" in done.stdout, done.stderr
        assert states(slurm_user, "study") == ["PENDING"] * 5
    finally:
        slurm_user.cookbook("cancel", "study")
        slurm.run(["scontrol", "update", "partitionname=gpu", "state=up"])
