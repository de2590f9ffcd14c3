"""cookbook results, diff and replay: what runs were set to, what came of them, once more."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths, yamlfile
from launcher.do import replay
from launcher.errors import UsageFault
from launcher.look import diff
from launcher.look.results import compare, ordered, table
from launcher.run import code
from launcher.run.directory import Run
from launcher.run.provenance import data_files
from launcher.run.states import state_of
from launcher.site import Site
from plugins.registry.launcher import facts
from tests.launcher.kit import Kit, losses

RECIPE = {
    "entry": "sft",
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.003},
    "batch_size": 8,
    "output_dir": "there",
}
MADE = {"kit": {"commit": "a" * 40, "diff": "", "untracked": []}, "packages": ["torch==2.13.0"]}


def made(root: Path, name: str, change: dict | None = None, loss: float = 0.5, **made_by) -> Run:
    """A finished run of 2 x 4 GPUs: an attempt that was lost, and one that was not."""
    run = Run(root / "runs" / f"20260102-030405-{name}-0a1b")
    run.path.mkdir(parents=True)
    asked = {"nodes": 2, "gpus_per_node": 4}
    run.write("submission.json", {"recipe": "demo", "jobs": [{"job_id": "7"}], "asked": asked})
    config = json.loads(json.dumps({**RECIPE, "output_dir": str(run.path)})) | (change or {})
    (run.path / "recipe.yaml").write_text(yamlfile.dump(config))
    run.write("provenance.json", {**MADE, **made_by})
    lines = [
        {"attempt": 0, "started": 1000.0, "ended": 1900.0, "cause": "killed", "checkpoint_step": 5},
        {"attempt": 1, "started": 2000.0, "ended": 2900.0, "cause": "finished"},
    ]
    (run.path / "attempts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    status = {"job_id": "7", "attempt": 1, "started": 2000.0, "ended": 2900.0, "nodes": ["a", "b"]}
    run.write("status.json", {**status, "state": "COMPLETED"})
    steps = [(4, 1300.0), (5, 1450.0), (6, 2100.0)]
    rows = [
        {"step": step, "time": when, "loss": loss, "peak_memory_reserved_gb": 10.0 + step}
        for step, when in steps
    ]
    (run.path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = {"state": "finished", "step": 6, "total_steps": 6, "loss_last": loss}
    run.write("progress.json", {**done, "tokens_per_second_per_gpu": 99.5, "mfu": 0.4})
    return run


def test_results_count_lost_work_and_cost(tmp_path):
    one, other = made(tmp_path, "one"), made(tmp_path, "other", {"batch_size": 16}, loss=0.25)
    rows, keys = compare([one, other], price=2.0)
    assert keys == ["batch_size"] and [row["settings"]["batch_size"] for row in rows] == [8, 16]
    # 900 s twice on 8 GPUs.
    assert (rows[0]["gpu_hours"], rows[0]["cost"]) == (4.0, 8.0)
    assert rows[0]["peak_measured_gib"] == 16.0 and rows[0]["peak_predicted_gib"] is None
    assert [row["run"] for row in ordered(rows)] == [other.name, one.name]


def test_the_last_mini_batch_does_not_decide(tmp_path, monkeypatch):
    """A worse model whose last mini-batch was an easy one; with val_loss that decides."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm to ask

    def run(name: str, last: list[float], **more: float) -> Run:
        found = made(tmp_path, name)
        losses = [3.0] * 18 + last
        lines = [{"step": k, "time": 2100.0, "loss": x} for k, x in enumerate(losses, 1)]
        lines[-1] |= more
        (found.path / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
        return found

    good, bad = run("good", [1.0, 1.1]), run("bad", [2.0, 0.9])
    rows, keys = compare([bad, good])
    assert [row["run"] for row in ordered(rows)] == [good.name, bad.name]
    assert {row["run"]: row["loss_last_tenth"] for row in rows} == {
        good.name: pytest.approx(1.05),
        bad.name: pytest.approx(1.45),
    }
    heading, *lines = table(ordered(rows), keys)
    assert "LOSS (LAST 10 %)" in heading and "VAL LOSS" not in heading
    assert "1.0500" in lines[0] and "1.4500" in lines[1]
    assert facts.outcomes(good, state_of(good))["outcome/loss_last_tenth"] == pytest.approx(1.05)
    good, bad = run("well", [2.0, 2.0], val_loss=1.0), run("ill", [1.0, 1.0], val_loss=2.0)
    rows, keys = compare([bad, good])
    assert [row["run"] for row in ordered(rows)] == [good.name, bad.name]
    heading = next(table(rows, keys))
    assert heading.index("VAL LOSS") < heading.index("LOSS (LAST 10 %)")


def test_no_setting_moves_the_terminal(tmp_path):
    odd = made(tmp_path, "other", {"batch_size": 16, "x\x1b]0;y\x07": "\x1b[2J"})
    heading, *lines = table(*compare([made(tmp_path, "one"), odd]))
    assert heading.split()[:2] == ["RUN", "STATE"] and "x\\x1b]0;y\\x07" in heading
    assert len(lines) == 2 and "16" in lines[1] and "\\x1b[2J" in lines[1]


def test_results_of_all_runs(tmp_path, user: Kit):
    user = Kit({**user.env, "COOKBOOK_ROOT": str(tmp_path)}, tmp_path)
    for k in range(22):
        made(tmp_path, f"a{k:02}")
    done = user.cookbook("results")
    assert len(done.stdout.splitlines()) == 21
    assert "the newest 20 of 22 runs; more: cookbook results --all" in done.stderr
    done = user.cookbook("results", "--all")
    assert len(done.stdout.splitlines()) == 23 and not done.stderr
    (first, *_) = json.loads(user.cookbook("results", "--all", "--json").stdout)
    assert first["loss_last_tenth"] == 0.5 and first["settings"] == {}
    done = user.cookbook("results", "--all", "a03")
    assert done.returncode == 2 and "give no RUN or SWEEP with it" in done.stderr


def test_diff_says_whether_only_one_thing_changed(tmp_path):
    one = made(tmp_path, "one")
    same = made(tmp_path, "same", loss=0.25)
    assert diff.differences(one, same) == []
    assert list(diff.lines(one, same))[-1].startswith("nothing recorded differs")
    rate = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.001}}
    told = list(diff.lines(one, made(tmp_path, "rate", rate, loss=0.25)))
    assert told[-1] == "one thing changed: configuration, optimizer.lr  0.003 -> 0.001"
    assert [line.split()[3] for line in told[-3:-1]] == ["0.5000", "0.2500"]
    kit = {"commit": "a" * 40, "diff": "-old\n+new\x1b[2J\n", "untracked": ["x.py"]}
    other = made(tmp_path, "code", rate, kit=kit, packages=["torch==2.12.0"])
    told = list(diff.lines(one, other))
    assert {each.part for each in diff.differences(one, other)} == {
        "configuration",
        "code",
        "packages",
    }
    assert "  uncommitted changes  none -> 2 lines" in told
    assert all(line.isprintable() for line in told)
    assert told[-1].startswith("4 things changed (1 in configuration, 2 in code, 1 in packages)")


def test_the_same_file_in_two_trees_that_a_laptop_sent_is_no_difference(tmp_path):
    runs = []
    for name, inside in (("a", "sub/../x.jsonl"), ("b", "x.jsonl"), ("c", "y.jsonl")):
        file = f"/shared/sent-1000/trees/{name * 64}/{inside}"
        data = [{"file": file, "sha256": "1"}]
        runs.append(made(tmp_path, name, {"dataset": {"data_files": [file]}}, data=data))
    assert diff.differences(*runs[:2]) == []
    assert len(diff.differences(*runs[1:])) == 3  # the setting; one file less, one more


def test_the_data_is_part_of_the_provenance(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("{}\n")
    (found,) = data_files({"dataset": {"data_files": str(file)}, "dataset_val": None})
    assert (found["bytes"], len(found["sha256"])) == (3, 64)
    one = made(tmp_path, "one", data=[found])
    file.write_text("{ }\n")
    other = made(tmp_path, "other", data=data_files({"dataset": {"data_files": [str(file)]}}))
    assert [each.part for each in diff.differences(one, other)] == ["data"]


def test_replay_uses_the_code_of_the_run(tmp_path, monkeypatch):
    site, said = Site(shared_root=str(tmp_path)), []
    run = made(tmp_path, "one", packages=["torch==1.0"], python="3.0")
    kit = code.present(site.root)
    code.link(run.path, kit)
    again = replay.prepare(run, site, [], said.append)
    assert again.code == kit.folder and not any("code" in line for line in said)
    recipe = Path(next(word for word in again.argv if word.endswith(".yaml")))
    assert recipe.stem == "demo" and "output_dir" not in yamlfile.load(recipe)
    assert (
        said[-1] == f"once it is submitted, compare both runs with: cookbook diff {run.name} last"
    )
    changed = shutil.copytree(kit.folder, tmp_path / "checkout")
    (changed / "runspec" / "new.py").write_text("")
    monkeypatch.setattr(paths, "REPO_ROOT", changed)
    assert replay.prepare(run, site, [], said.append).code == kit.folder
    assert any(line.startswith(f"code: {kit.sha256[:12]} (commit ") for line in said), said
    code.link(run.path, code.Code(tmp_path / "gone"))
    other = replay.prepare(run, site, [], said.append).code
    assert any("the current code is used" in line for line in said)
    assert other != kit.folder and (other / "runspec" / "new.py").is_file()


def test_what_cannot_be_replayed_says_so(tmp_path):
    script = made(tmp_path, "own", {"entry": "script:train.py"})
    with pytest.raises(UsageFault, match="ran its own script"):
        replay.prepare(script, Site(shared_root=str(tmp_path)), [], print)
    (script.path / "provenance.json").unlink()
    with pytest.raises(UsageFault, match="so it cannot be replayed"):
        replay.prepare(script, Site(shared_root=str(tmp_path)), [], print)


@pytest.mark.long
def test_a_replayed_run_has_the_same_losses(user: Kit, kit: Kit, tmp_path):
    """Made by a checkout with an uncommitted change that the present code does not have."""
    if (kit.root / "models").is_dir():
        shutil.copytree(kit.root / "models", user.root / "models")
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--shared", paths.REPO_ROOT, checkout], check=True)
    loop = checkout / "trainer" / "schedule.py"
    loop.write_text(loop.read_text() + "\n# a change\n")
    small = ["max_steps=4", "log_every_n_steps=1"]
    argv = [sys.executable, "-m", "launcher", "submit", "demo", "--gpus-per-node", "1"]
    done = subprocess.run(
        [*argv, "--local", "--watch", "--nodes", "1", *small],
        cwd=checkout,
        env={**user.env, "PYTHONPATH": str(checkout), "COOKBOOK_VENV": sys.prefix},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    again = user.cookbook("replay", "last", "--local")
    assert again.returncode == 0, again.stderr
    first, second = user.runs()
    watched = user.cookbook("watch", second.name)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert losses(first) == losses(second)
    told = user.cookbook("diff", first.name, second.name).stdout
    assert told.splitlines()[-1].startswith("nothing recorded differs"), told
    assert (first / "kit").resolve() == (second / "kit").resolve()
    assert "# a change" in (second / "kit" / "trainer" / "schedule.py").read_text()
