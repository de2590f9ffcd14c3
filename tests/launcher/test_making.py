"""Run directories that were never whole: what a killed command left is removed by the next."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths
from launcher.errors import RunFault
from launcher.runs import code, directory
from launcher.runs.making import half_made

MAKES = """
import sys, time
from pathlib import Path
from launcher.runs.making import half_made
with half_made(Path(sys.argv[1])) as folder:
    (folder / "job.sbatch").touch()
    print("making", flush=True)
    time.sleep(600)
"""
NAME = "20261122-100000-{}-aaaa"
KIT = code.Code(Path("code"))


def making(root: Path, label: str) -> subprocess.Popen[bytes]:
    """A command that is making a run."""
    argv = [sys.executable, "-c", MAKES, str(root / NAME.format(label))]
    maker = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert maker.stdout is not None and maker.stdout.readline() == b"making\n"
    return maker


def test_what_a_killed_command_left_is_removed_by_the_next(tmp_path):
    killed, alive = making(tmp_path, "killed"), making(tmp_path, "alive")
    try:
        killed.kill()
        killed.wait()
        # That host may still be at it, but not for a day.
        for label, age_s in (("elsewhere", 3600), ("forgotten", 2 * 86400)):
            folder = tmp_path / f".tmp-{NAME.format(label)}"
            folder.mkdir()
            (folder / ".lock").write_text("process 1 on another-host")
            when = folder.stat().st_mtime - age_s
            os.utime(folder, (when, when))
        assert len(list(tmp_path.iterdir())) == 4
        run = directory.create(tmp_path / NAME.format("new"), {"train.yaml": "{}"}, KIT)
        left = sorted(path.name.split("-")[3] for path in tmp_path.glob(".tmp-*"))
        assert left == ["alive", "elsewhere"] and (run.path / "train.yaml").exists()
    finally:
        alive.kill()
        alive.wait()


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_a_command_that_is_interrupted_leaves_nothing(tmp_path, fault):
    with pytest.raises(fault), half_made(tmp_path / NAME.format("new")) as folder:
        (folder / "job.sbatch").touch()
        raise fault
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunFault, match="cannot make the run directory"):
        directory.create(tmp_path / "x", {"no/such/folder": ""}, KIT)
    assert list(tmp_path.iterdir()) == []


def test_two_commands_that_copy_the_same_code_at_once_share_it(tmp_path, monkeypatch):
    state, copies = (
        code.git_state,
        "from launcher.runs import code; code.present(Path(sys.argv[1]))",
    )

    def another_was_faster():
        argv = [sys.executable, "-c", f"import sys; from pathlib import Path; {copies}"]
        subprocess.run([*argv, str(tmp_path)], check=True)
        return state()

    monkeypatch.setattr(code, "git_state", another_was_faster)
    made = code.present(tmp_path)
    assert (made.folder / "slurm/supervise.sh").is_file()
    assert [path.name for path in made.folder.parent.iterdir()] == [made.sha256]


def test_settings_of_sites_are_no_part_of_the_code(tmp_path, monkeypatch):
    """Neither the checkout's nor those in use: another user's run may have the same code."""
    usual = code.present(tmp_path)
    assert not (usual.folder / "configs/clusters").exists()
    monkeypatch.setattr(paths, "CLUSTERS", tmp_path)
    assert code.present(tmp_path) == usual
