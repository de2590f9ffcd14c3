"""One process at a time holds a lock; who waits is told who has it."""

import subprocess
import sys

import pytest

from runspec import lock

HOLDS = "import sys, pathlib; from runspec import lock; held = lock.take(pathlib.Path(sys.argv[1]))"


def test_the_holder_is_named_and_its_end_frees_the_lock(tmp_path):
    path, told = tmp_path / ".lock", []
    argv = [sys.executable, "-c", f"{HOLDS}; print('held', flush=True); sys.stdin.read()", path]
    other = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(lock.Held, match=f"^process {other.pid} on "):
            lock.take(path)
        with open(path) as file:
            assert not lock.try_open(file)

        def waiting(held_by: str) -> None:
            told.append(held_by)
            other.kill()

        with lock.take(path, 60, waiting):
            assert path.read_text() == lock.holder()
        assert [each.split()[1] for each in told] == [str(other.pid)]
    finally:
        other.kill()
        other.wait()
    with open(path) as file:
        assert lock.try_open(file)
