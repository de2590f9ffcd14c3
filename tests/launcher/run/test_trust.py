"""In a shared folder nothing is executed that a colleague could have put there."""

import os
import pwd
import stat
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from launcher.check.files import _adapter
from launcher.do.resume import Changes, _refuse_others, resume
from launcher.errors import RunFault
from launcher.recipe.environment import Environment
from launcher.run import built, code, directory, trust
from launcher.run.directory import Run
from launcher.site import Site


def test_only_code_that_nobody_else_could_change_is_used(tmp_path):
    """What a colleague plants under its name, and what is changed in it."""
    made = code.present(tmp_path)
    assert code.present(tmp_path) == made and made.folder.parent.parent.stat().st_mode & 0o1000
    script, added = made.folder / "slurm/allocation.py", made.folder / "yaml.py"
    before = script.read_bytes()
    script.write_bytes(before + b"#")
    with pytest.raises(RunFault, match="is not the code that its name says: remove"):
        code.present(tmp_path)
    script.write_bytes(before)
    added.write_text("")
    with pytest.raises(RunFault, match="is not the code that its name says"):
        code.require(made)
    added.unlink()
    script.chmod(0o660)
    with pytest.raises(RunFault, match=r"allocation.py can be changed by others \(mode 660\)"):
        code.require(made)
    script.chmod(0o640)
    (made.folder / "trainer/__pycache__").rmdir()
    (made.folder / "trainer/__pycache__").symlink_to(tmp_path)
    with pytest.raises(RunFault, match="__pycache__ is a link"):
        code.require(made)
    (made.folder / "trainer/__pycache__").unlink()
    code.require(made)


@pytest.fixture(params=["umask 002 and setgid", "default ACL"])
def group_folder(tmp_path, request):
    """A project's folder: what is made in it belongs to its group, which may write there."""
    before = os.umask(0o002)
    if request.param == "default ACL":
        # Version 2, then tag, permissions and id: owner, group, the mask, others.
        entries = [(1, 7), (4, 7), (16, 7), (32, 5)]
        acl = b"".join(struct.pack("<HHI", *entry, 2**32 - 1) for entry in entries)
        try:
            os.setxattr(tmp_path, "system.posix_acl_default", struct.pack("<I", 2) + acl)
        except OSError:
            pytest.skip("this filesystem has no ACL")
    tmp_path.chmod(0o2775)
    yield tmp_path
    os.umask(before)


def test_what_the_kit_makes_in_a_folder_of_a_group_stays_usable(group_folder):
    made = code.present(group_folder)
    assert made.folder.stat().st_mode & stat.S_ISGID
    # As jobs and replay do, with the umask of whoever submits.
    variables = {**os.environ, "PYTHONPATH": str(made.folder), "PYTHONDONTWRITEBYTECODE": ""}
    argv = [sys.executable, "-P", "-c", "import runspec.files, slurm.records"]
    subprocess.run(argv, env=variables, cwd="/", check=True)
    assert list((made.folder / "runspec/__pycache__").glob("files.*.pyc"))
    assert code.present(group_folder) == made
    for umask, mode in ((0o077, 0o700), (0o027, 0o750)):
        path = group_folder / "runs" / f"20261122-151728-demo-{umask:04x}"
        run = directory.create(path, {}, made, umask=umask)
        assert run.path.stat().st_mode & 0o777 == mode
        assert trust.fault(run.path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to somebody else")
def test_what_belongs_to_a_colleague_is_used_if_the_site_names_them(tmp_path):
    theirs, nobody = tmp_path / "theirs", pwd.getpwnam("nobody")
    theirs.mkdir()
    os.chown(theirs, nobody.pw_uid, -1)
    assert trust.fault(theirs) == f"{theirs} belongs to nobody"
    assert trust.fault(theirs, ["nobody"]) is None
    os.chown(code.present(tmp_path).folder / "slurm/supervise.sh", nobody.pw_uid, -1)
    with pytest.raises(RunFault, match=r"supervise.sh belongs to nobody: remove"):
        code.present(tmp_path)
    environment = Environment(kind="venv", dependencies=("einops",))
    place = built.folder(environment, tmp_path)
    (place / "bin").mkdir(parents=True)
    (place / "cookbook.json").write_text("{}")
    assert built.is_built(environment, tmp_path)
    for planted in (place, place.parent):
        os.chown(planted, nobody.pw_uid, -1)
        with pytest.raises(RunFault, match="belongs to nobody: remove it"):
            built.is_built(environment, tmp_path)
        os.chown(planted, 0, -1)
    run = Run(tmp_path / "runs" / "20261122-151728-demo-abcd")
    run.path.mkdir(parents=True)
    run.write("submission.json", {"recipe": "demo", "jobs": []})
    os.chown(run.path, nobody.pw_uid, -1)
    with pytest.raises(RunFault, match="belongs to nobody: its job would execute what others"):
        _refuse_others(run, None)
    site = Site(trusted_users=["nobody"])
    _refuse_others(run, Changes(site))
    # For a colleague, who is not root, the lock cannot be opened.
    (run.path / ".lock").mkdir()
    with pytest.raises(RunFault, match=r"belongs to nobody, and a job .*: cookbook replay 2026"):
        resume(run)
    run.path.chmod(0o775)
    for uid in (nobody.pw_uid, 0):
        os.chown(run.path, uid, -1)
        with pytest.raises(RunFault, match=f"mode 775.*if you trust that, chmod go-w {run.path}"):
            _refuse_others(run, Changes(site))
    run.path.chmod(0o755)
    os.chown(run.path, nobody.pw_uid, -1)
    adapter = {"checkpointer": {"adapter_checkpoint": str(run.path / "export" / "adapter")}}
    for trusted, count in (([], 1), (["nobody"], 0)):
        context = SimpleNamespace(config=adapter, cluster=Site(trusted_users=trusted))
        assert len(list(_adapter(context))) == count
