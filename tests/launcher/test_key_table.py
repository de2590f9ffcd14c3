"""The keys of recipes: their page, their kinds, and which may change when a run resumes."""

import pytest

from launcher import paths
from launcher.cli.reference import keys
from launcher.recipe.entries import all_keys
from runspec.keys.key import KINDS, REQUIRED, may_change


def test_the_page_of_keys_is_what_the_table_says():
    page = (paths.REPO_ROOT / "docs" / "keys.md").read_text()
    assert page == keys(), "python -m launcher.cli.reference keys > docs/keys.md"
    for name in all_keys():
        assert f"| `{name}` |" in page


def test_every_key_of_the_table_is_of_a_kind_and_in_a_block():
    for name, key in all_keys().items():
        assert key.choices or key.kind in KINDS, name
        assert key.help.endswith(".") and "\n" not in key.help, name
        assert key.default in (None, REQUIRED) or key.fault(key.default) is None, name
        block = name.rpartition(".")[0]
        assert not block or "block" in all_keys()[block].kind or all_keys()[block].is_open, name


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("optimizer.lr", True),
        ("optimizer._component_", False),
        ("epochs", True),
        ("model.lora_rank", False),
        ("resources.nodes", True),
        ("profiler.ranks", True),
        ("dataset_val.split", True),
        ("dataset.split", False),
        ("nothing", False),
    ],
)
def test_which_keys_may_change_when_a_run_resumes(name, may):
    assert may_change(all_keys(), name) is may
