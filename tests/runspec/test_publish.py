"""A folder appears under its name whole, or not at all; what others left goes."""

import os
from pathlib import Path

import pytest

from runspec import files, publish


def put(path: Path, text: str, **options) -> None:
    with publish.folder(path, **options) as folder:
        assert not path.exists() or (path / "x").read_text() != text
        (folder / "x").write_text(text)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("existing", "kept"), [("replace", "new"), ("keep", "old"), ("refuse", "old")]
)
def test_a_folder_that_has_the_name_is_replaced_kept_or_refused(tmp_path, existing, kept, alone):
    path = tmp_path / "set"
    put(path, "old", existing="refuse", alone=alone)
    try:
        put(path, "new", existing=existing, alone=alone, flush=True)
    except OSError:
        assert existing == "refuse"
    else:
        assert existing != "refuse"
    assert (path / "x").read_text() == kept
    assert os.listdir(tmp_path) == ["set"]


def test_a_failure_leaves_the_old_folder_alone(tmp_path):
    put(tmp_path / "set", "old", existing="refuse")
    with pytest.raises(KeyboardInterrupt), publish.folder(tmp_path / "set", "replace"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["set"] and (tmp_path / "set/x").read_text() == "old"


def test_what_a_killed_writer_left_goes(tmp_path):
    """At once if nobody else writes it, else once no other host can be at it any more."""
    path = tmp_path / "set"
    young, old = publish.begin(path), publish.begin(path)
    os.utime(old, (0, 0))
    own = publish.begin(path, alone=True)
    (own / "part").touch()
    file = files.beside(path)
    file.touch()
    os.utime(file, (0, 0))
    put(path, "new", existing="refuse", alone=True)
    assert set(tmp_path.iterdir()) == {path, young}


def test_a_link_is_replaced(tmp_path):
    for target in ("one", "two"):
        publish.link(tmp_path / "current", target)
    assert os.readlink(tmp_path / "current") == "two" and os.listdir(tmp_path) == ["current"]
