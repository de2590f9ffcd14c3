"""Files of a run directory are replaced whole, and damaged ones are told from missing ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runspec import files


def test_a_file_is_replaced_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "status.json"
    files.write_json(path, {"state": "RUNNING"})
    files.write_json(path, {"state": "COMPLETED"}, mode=0o600)
    assert files.read_json(path) == {"state": "COMPLETED"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["status.json"]


def test_without_a_mode_the_umask_decides(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "x", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "x"
    files.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "\udc80")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_the_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """A crash after the rename must not leave an empty file: fsync comes first."""
    calls = []

    def spied(name):
        real = getattr(os, name)

        def call(*arguments):
            if name == "fsync":
                calls.append((name, Path(os.readlink(f"/proc/self/fd/{arguments[0]}")).name))
            else:
                calls.append((name, Path(arguments[0]).name))
            return real(*arguments)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, spied(name))
    files.write_json(tmp_path / "status.json", {"state": "RUNNING"})
    files.append_json_line(tmp_path / "attempts.jsonl", {"attempt": 0})
    (synced, temporary), (renamed, source), appended = calls
    assert (synced, renamed) == ("fsync", "replace")
    assert temporary == source
    assert appended == ("fsync", "attempts.jsonl")


def test_a_reader_never_sees_a_part(tmp_path):
    """A process that writes all the time is read, and killed, at any moment."""
    path = tmp_path / "big.json"
    program = (
        "import sys; from pathlib import Path; from runspec import files\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1; files.write_json(Path(sys.argv[1]), {'n': n, 'x': ['y'] * 20000})\n"
    )
    root = Path(__file__).parents[2]
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=root)
    try:
        while not path.exists():
            assert writer.poll() is None
        seen = {files.read_json(path)["n"] for _ in range(200)}
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) > 1
    assert files.read_json(path)["n"] >= max(seen)


def test_missing_and_damaged_are_not_the_same(tmp_path):
    path = tmp_path / "x.json"
    assert (files.read_json(path), files.read_object(path), files.peek(path)) == (None, None, {})
    for text in ('{"a": 1', "", "[" * 100_000, '{"a":' * 100_000, "9" * 400):
        path.write_text(text)
        for read in (files.read_json, files.read_object):
            with pytest.raises(files.DamagedFile, match=r"x\.json does not hold JSON"):
                read(path)
        assert files.peek(path) == {}
    path.write_text("[1]")
    with pytest.raises(files.DamagedFile, match=r"x\.json does not hold a JSON object"):
        files.read_object(path)
    path.unlink()
    path.symlink_to(path)
    for read in (files.read_json, files.read_object):
        with pytest.raises(OSError, match="symbolic links"):
            read(path)
    assert files.peek(path) == {}


def test_a_line_that_is_cut_short_is_left_out(tmp_path):
    path = tmp_path / "attempts.jsonl"
    assert files.read_json_lines(path) == []
    files.append_json_line(path, {"attempt": 0})
    with path.open("ab") as file:
        file.write(b'{"attempt": 1}\n' + b"[" * 100_000 + b'\n{"att\xff')
    assert files.read_json_lines(path) == [{"attempt": 0}, {"attempt": 1}]
    for number in (2, 3):
        files.append_json_line(path, {"attempt": number})
    assert [line["attempt"] for line in files.read_json_lines(path)] == [0, 1, 2, 3]
    assert files.last_json_line(path) == {"attempt": 3}
    assert path.read_bytes().count(b"\n") == 6, "no line is empty"


def test_only_complete_checkpoints_count(tmp_path):
    for name, complete in (("step_5", True), ("step_10", True), ("step_20", False), ("x", True)):
        folder = tmp_path / files.CHECKPOINTS / name
        folder.mkdir(parents=True)
        if complete:
            (folder / files.CHECKPOINT_COMPLETE).touch()
    assert files.checkpoint_steps(tmp_path) == [5, 10]


def test_the_hash_is_of_the_whole_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"ab" * (1 << 22))
    done = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
    assert files.sha256(path) == done.stdout.split()[0]
