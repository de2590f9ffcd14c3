"""Every patch of a deliberate fault still applies, and names tests that exist."""

from tests.mutations.__main__ import FOLDER, ROOT, Patch, apply


def test_every_patch_applies_and_names_tests_that_exist() -> None:
    paths = sorted(FOLDER.glob("*.patch"))
    assert paths
    for path in paths:
        files = [word for word in Patch.read(path).tests if word.startswith("tests/")]
        assert files and all((ROOT / file.partition("::")[0]).is_file() for file in files), path
        assert apply(path, ROOT, "--check") == "", path
