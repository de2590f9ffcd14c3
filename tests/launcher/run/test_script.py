"""entry: script: a training script of the user's own, from its snapshot to its end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import check as checks
from launcher import paths
from launcher import site as cluster
from launcher.check import preflight
from launcher.errors import RecipeFault
from launcher.recipe import load as recipes
from launcher.run import snapshot
from launcher.slurm.executors import choose
from tests.launcher.kit import BY_SHELL, Kit, project, ranks_of, report, until

EXAMPLE = paths.REPO_ROOT / "examples/transformers_fsdp/transformers_fsdp.yaml"
SECRET = "a-value-that-nothing-may-show"
TELL = """
import json, os, sys, yaml
from pathlib import Path
import helper

told = {
    "arguments": sys.argv[1:],
    "here": os.getcwd(),
    "parameters": yaml.safe_load(Path(os.environ["COOKBOOK_PARAMETERS"]).read_text()),
    "greeting": os.environ["GREETING"],
    "secret_matches": os.environ["MY_KEY"] == helper.expected(),
    "world": os.environ["WORLD_SIZE"],
}
(Path(os.environ["RUN_DIR"]) / f"told_{os.environ['RANK']}.json").write_text(json.dumps(told))
"""


def faults(path: Path, *overrides: str) -> list[str]:
    return preflight.faults(
        checks.Context(recipes.load(str(path), overrides), cluster.Site(), executor=choose(True))
    )


def test_a_script_gets_a_copy_of_its_folder_and_all_that_the_recipe_says(kit: Kit, tmp_path):
    secret = tmp_path / "key"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    path = project(
        tmp_path,
        TELL,
        args=["--greet", "it's $(id)", 3],
        env={"GREETING": "hello $HOME"},
        secrets={"MY_KEY": str(secret)},
        parameters={"lr": 1e-4, "models": "${models_root}/x"},
    )
    helper = path.parent / "helper.py"
    helper.write_text(f"def expected():\n    return {SECRET[::-1]!r}[::-1]\n")
    _, run = kit.submit("--recipe", str(path), "parameters.lr=5e-4")
    helper.write_text("raise SystemExit('changed after submission')\n")
    kit.wait(run, "COMPLETED", "FAILED")
    assert kit.status(run)["state"] == "COMPLETED", report(run)
    for rank in (0, 1):
        assert json.loads((run / f"told_{rank}.json").read_text()) == {
            "arguments": ["--greet", "it's $(id)", "3"],
            "here": str(run / "code"),
            "parameters": {"lr": 5e-4, "models": f"{kit.root}/models/x"},
            "greeting": "hello $HOME",
            "secret_matches": True,
            "world": "2",
        }
    for file in run.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_a_missing_package_is_named_with_its_remedy_and_not_tried_again(kit: Kit, tmp_path):
    # The check before the queue sees only what is imported by an import statement.
    code = "import importlib\nimportlib.import_module('not_there.deep')\n"
    path = project(tmp_path, code, max_retries=3, environment={"python": sys.executable})
    _, run = kit.submit("--recipe", str(path), "--nodes", "1", "--local")
    kit.wait(run, "FAILED", "COMPLETED")
    (line,) = (json.loads(each) for each in (run / "attempts.jsonl").read_text().splitlines())
    assert line["cause"] == "missing_package", report(run)
    assert "ModuleNotFoundError: No module named 'not_there' (train.py:2)" in line["message"]
    remedy = f"the environment of the recipe (venv) lacks it: {sys.executable} -m pip install "
    assert line["message"].endswith(remedy + "not_there")


def test_a_secret_in_an_exception_reaches_no_record(kit: Kit, tmp_path):
    secret = tmp_path / "key"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    words = (
        "import os\nraise ValueError('no access with', os.environ['MY_KEY'], 'hf_' + 'a' * 30)\n"
    )
    path = project(tmp_path, words, **BY_SHELL, secrets={"MY_KEY": str(secret)})
    _, run = kit.submit("--recipe", str(path), "--nodes", "1", "--local")
    told = kit.wait(run, "FAILED", "COMPLETED")
    assert "ValueError: ('no access with', '<MY_KEY>', '<redacted>')" in told["detail"], report(run)
    assert len((run / "attempts.jsonl").read_text().splitlines()) == 1, "not tried again"
    found = {file.name for file in run.rglob("*") if file.is_file() and SECRET in file.read_text()}
    assert found == {"rank_0.log", "node_0.log"}


@pytest.mark.long
def test_the_example_trains_and_survives_a_killed_rank(kit: Kit):
    _, run = kit.submit("--recipe", str(EXAMPLE), "--nodes", "2", "parameters.save_every=5")
    until(lambda: (run / "checkpoints/step_5/COMPLETE").exists(), 120, lambda: report(run))
    os.kill(ranks_of(run, "train.py")[1], signal.SIGKILL)
    kit.wait(run, "COMPLETED", "FAILED")
    assert kit.status(run)["state"] == "COMPLETED", report(run)
    first, second = ((run / "logs" / k / "rank_0.log").read_text() for k in "01")
    assert "step 1/40" in first and "step 1/40" not in second
    assert "step 40/40" in second
    assert (run / "export" / "model.safetensors").is_file()


def test_a_snapshot_holds_what_git_does_not_ignore(tmp_path):
    for name in ("a.py", "sub/b.py", "data/big.bin", ".hidden/c", "venv/pyvenv.cfg", "venv/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    without_git = {"a.py", "sub/b.py", "data/big.bin"}
    assert set(map(str, snapshot.files(tmp_path))) == without_git
    (tmp_path / ".gitignore").write_text("data/\nvenv/\n.hidden/\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert set(map(str, snapshot.files(tmp_path))) == {".gitignore", "a.py", "sub/b.py"}
    private, copy = tmp_path.parent / "id_rsa", tmp_path.parent / "copy"
    private.write_text("private")
    for name, target in (("notes", "../id_rsa"), ("inside", "sub/b.py")):
        (tmp_path / name).symlink_to(target)
    snapshot.copy(tmp_path, copy)
    assert (copy / "sub/b.py").read_text() == "sub/b.py"
    # What a link outside the tree leads to is not made readable for whom the run is.
    assert (copy / "notes").readlink() == private and not (copy / "inside").is_symlink()


def test_every_fault_of_a_script_is_named_at_once(tmp_path):
    path = project(tmp_path, "pass\n", secrets=["NOT_THERE_KEY"])
    open_to_all = tmp_path / "open"
    open_to_all.write_text("x")
    open_to_all.chmod(0o644)
    (found,) = faults(path)
    assert "slurm-cookbook/secrets/NOT_THERE_KEY does not exist: write the value" in found
    found = faults(path, f"secrets={{A: {open_to_all}, B: /nowhere}}", "entry=script:trian.py")
    wanted = ("others may read", "B: /nowhere does not exist", "there is no script")
    assert len(found) == 3
    assert all(part in fault for part, fault in zip(wanted, found, strict=True))
    (found,) = faults(path, "~secrets", "+code_root=/etc")
    assert "is not in code_root /etc" in found
    with open(path.parent / "weights.bin", "wb") as file:
        file.truncate(snapshot.LIMIT_BYTES + 1)
    (found,) = faults(path, "~secrets")
    assert "the largest file is weights.bin (100 MiB)" in found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch_size": 3}, "unknown key 'batch_size'"),
        ({"parmeters": {}}, "did you mean parameters?"),
        ({"env": {"WANDB_API_KEY": "x"}}, "keep secrets out of it; name it under secrets:"),
        ({"env": {"A": "b\nc"}}, "env.A must be one line"),
        ({"secrets": "KEY"}, "secrets must be a list of names"),
        ({"secrets": ["A B"]}, "not a valid variable name"),
        ({"args": ["a\nb"]}, "not one line of text"),
    ],
)
def test_a_wrong_key_of_a_script_recipe_is_one_fault(tmp_path, change, told):
    path = project(tmp_path, "pass\n", **change)
    with pytest.raises(RecipeFault) as fault:
        recipes.load(str(path))
    (line,) = fault.value.faults
    assert told in line
