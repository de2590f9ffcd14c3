"""Run directories and copies of the code appear whole, or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths
from launcher.errors import RunFault
from launcher.run import code, directory

NAME = "20261122-100000-new-aaaa"
KIT = code.Code(Path("code"))


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_a_command_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch, fault):
    def copied(folder, kit):
        raise fault

    monkeypatch.setattr(code, "link", copied)
    told = RunFault if fault is OSError else fault
    with pytest.raises(told):
        directory.create(tmp_path / NAME, {"train.yaml": "{}"}, KIT)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunFault, match="cannot make the run directory"):
        directory.create(tmp_path / "x", {"no/such/folder": ""}, KIT)
    assert list(tmp_path.iterdir()) == []


def test_two_commands_that_copy_the_same_code_at_once_share_it(tmp_path, monkeypatch):
    state, copies = (
        code.git_state,
        "from launcher.run import code; code.present(Path(sys.argv[1]))",
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
