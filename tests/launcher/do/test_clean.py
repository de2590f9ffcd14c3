"""cookbook clean: what can go, with its size; and what stays."""

import json
import os
import pwd
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.cli import cookbook
from launcher.run import code


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("COOKBOOK_ROOT", str(tmp_path / "shared"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "shared"


def aged(path: Path, days: float) -> Path:
    """A file, as if written and read last so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(8192))
    then = time.time() - days * 86400
    for each in (path, *path.parents[:2]):
        os.utime(each, (then, then))
    return path


CODE, ENVIRONMENTS = (f"{name}/{os.geteuid()}" for name in ("code", "environments"))


def clean(*arguments: str) -> Result:
    return CliRunner().invoke(cookbook, ["clean", *arguments])


def test_what_can_be_made_again_goes_and_runs_stay(root: Path):
    run = root / "runs/20260101-000000-mine-abcd"
    stays = [
        aged(run / "checkpoints/step_5/shard", 90),
        aged(run / "recipe.yaml", 90),
        aged(root / "models/base/model.safetensors", 90),
        aged(root / "runs/.data_cache/new/tokens", 1),
        aged(root / CODE / "used/trainer/sft.py", 90),
        aged(root / CODE / "young/trainer/sft.py", 0),
        aged(root / ENVIRONMENTS / ("a" * 16) / "cookbook.json", 30),
    ]
    (run / "job.sbatch").write_text(f"python={root}/{ENVIRONMENTS}/{'a' * 16}/bin/python\n")
    (run / "submission.json").write_text(json.dumps({"jobs": [{"job_id": "1"}]}))
    (run / "status.json").write_text(json.dumps({"job_id": "1", "state": "COMPLETED"}))
    code.link(run, code.Code(root / CODE / "used"))
    goes = [
        aged(root / "runs/.data_cache/old/tokens", 30),
        aged(root / CODE / "unused/trainer/sft.py", 30),
        aged(root / ENVIRONMENTS / ("b" * 16) / "cookbook.json", 30),
        aged(root / "runs/.tmp-20260101-000000-mine-ffff/recipe.yaml", 30),
        aged(run / "checkpoints/damaged_step_3/shard", 30),
    ]
    listed = clean()
    assert listed.exit_code == 0, listed.output + repr(listed.exception)
    assert "remove it with: cookbook clean --yes" in listed.output
    assert all(path.exists() for path in (*stays, *goes))
    shown = [line.split("MiB  ")[1] for line in listed.output.splitlines() if "MiB  /" in line]
    assert len(shown) == len(goes)
    assert all(any(path.is_relative_to(place) for path in goes) for place in shown)
    assert clean("--yes").exit_code == 0
    assert all(path.exists() for path in stays) and not any(path.exists() for path in goes)
    assert clean().output == "nothing to remove\n"


def test_what_open_runs_need_stays(root: Path):
    run = root / "runs/20260101-000000-mine-abcd"
    stays = [
        aged(root / "runs/.data_cache/old/reference_1/meta.json", 30),
        aged(run / "checkpoints/damaged_step_3/shard", 30),
    ]
    waits = {"job_id": f"local-{os.getpid()}", "host": "another", "process_start": "1"}
    (run / "submission.json").write_text(json.dumps({"jobs": [waits]}))
    assert clean("--yes").exit_code == 0 and all(path.exists() for path in stays)
    # As if its storage were away: a link to itself cannot be read.
    ended = run / "status.json"
    ended.symlink_to(ended)
    unused = aged(root / CODE / "unused/trainer/sft.py", 30)
    assert clean("--yes").exit_code == 0 and all(path.exists() for path in (*stays, unused))
    if os.geteuid() == 0:
        # A colleague's private run uses no code of this user.
        os.chown(run, pwd.getpwnam("nobody").pw_uid, -1)
        assert clean("--yes").exit_code == 0 and all(path.exists() for path in stays)
        assert not unused.exists()
        os.chown(run, 0, -1)
    ended.unlink()
    ended.write_text(json.dumps({**waits, "state": "COMPLETED"}))
    assert clean("--yes").exit_code == 0
    assert not any(path.exists() for path in (*stays, unused))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to somebody else")
def test_a_colleagues_run_that_cannot_be_read_keeps_tokenised_data_for_a_while(root: Path):
    run = root / "runs/20260101-000000-theirs-abcd"
    tokens = aged(root / "runs/.data_cache/old/tokens", 30)
    aged(run / "logs/job.log", 40)
    (run / "status.json").symlink_to("status.json")
    then = time.time() - 40 * 86400
    for uid, changed in ((0, then), (pwd.getpwnam("nobody").pw_uid, time.time())):
        os.chown(run, uid, -1)
        os.utime(run, (changed, changed))
        assert clean("--yes").exit_code == 0 and tokens.exists()
    os.utime(run, (then, then))
    assert clean("--yes").exit_code == 0 and not tokens.exists()


def test_data_that_a_run_uses_stay(root: Path):
    tokens = aged(root / "runs/.data_cache/recent/tokens", 3)
    assert clean("--yes").output == "nothing to remove\n" and tokens.exists()
