"""YAML is read as torchtune's OmegaConf reads it, and what is written is read back alike."""

from pathlib import Path

import pytest

from launcher import yamlfile
from launcher.errors import RecipeFault


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2.5e3", 2500.0),
        (".5", 0.5),
        ("-3", -3),
        ("12:00:00", "12:00:00"),
        ("2026-01-02", "2026-01-02"),
        ("007", "007"),
        ("1_000", "1_000"),
        ("'12'", "12"),
        ("null", None),
        ("true", True),
        ("[1, a]", [1, "a"]),
    ],
)
def test_a_value_is_read_for_what_it_looks_like(text, value):
    assert yamlfile.parse(f"key: {text}", "a test") == {"key": value}
    assert yamlfile.parse(yamlfile.dump({"key": value}), "its dump") == {"key": value}


def test_text_that_looks_like_a_number_stays_text_for_us_and_for_omegaconf(tmp_path):
    from omegaconf import OmegaConf

    value = {
        "time": "12:00:00",
        "minutes": "90",
        "rate": "1e-4",
        "size": "0",
        "word": "no",
        "lr": 2e-5,
    }
    path = tmp_path / "file.yaml"
    path.write_text(yamlfile.dump(value))
    assert yamlfile.load(path) == value
    assert OmegaConf.to_container(OmegaConf.load(path)) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1, 2\nb: 3\n", "line 2, column 2"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' is given twice"),
        ("model:\n  lr: 1\n rank: 2\n", "line 3, column 2"),
        ("a: !!python/object/apply:os.system ['true']\n", "line 1, column 4"),
        ("- just\n- a list\n", "has no 'key: value' lines"),
    ],
)
def test_a_broken_file_names_the_place(tmp_path, text, told):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(RecipeFault) as fault:
        yamlfile.load(path)
    assert told in str(fault.value)
    assert str(path) in str(fault.value)
    assert "\n" not in str(fault.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(RecipeFault, match="not UTF-8"):
        yamlfile.load(path)
    with pytest.raises(RecipeFault, match="No such file"):
        yamlfile.load(Path(tmp_path / "none.yaml"))
