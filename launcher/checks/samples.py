"""The first samples of a recipe's data, as the trainer reads, cuts and packs them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.checks import Context, Finding, Skipped, failed, files, preflight, skipped
from launcher.checks.recipe import ask_for_samples
from launcher.errors import UsageFault

SUBJECT = "samples"


def read(context: Context, count: int) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Return the findings on a recipe's samples, and of each dataset what the trainer shows.

    UsageFault if the recipe's entry is not the kit's trainer.
    """
    recipe = context.recipe
    if recipe.entry.checked != "complete":
        raise UsageFault(
            f"--samples: {recipe.name} starts {recipe.entry_name}, and only data of the kit's own "
            "trainer can be shown: leave --samples out"
        )
    shown: list[dict[str, Any]] = []

    def look(context: Context) -> Iterable[Finding]:
        _check_readable(context)
        datasets, faults = ask_for_samples(context, count, _variables(context))
        shown.extend(datasets)
        return [_finding(context, fault) for fault in faults]

    return preflight.findings(SUBJECT, look, context), shown


def _finding(context: Context, fault: str) -> Finding:
    """A fault of the data; that a dataset of the hub is not downloaded yet is none."""
    key, _, words = fault.partition(": ")
    block = context.config.get(key)
    if words.startswith("cannot be opened") and isinstance(block, dict) and files.on_hub(block):
        name = block.get("source") or "its dataset"
        remedy = f"cookbook download {context.recipe.given_name}"
        return skipped(SUBJECT, f"{key}: {name} is not on this machine", remedy)
    return failed(SUBJECT, fault)


def _check_readable(context: Context) -> None:
    """Skip what another check has found not to be there, or what only the nodes have."""
    if not context.prepared:
        raise Skipped("the model is made at submission, and its tokenizer with it")
    for name, check in (("tokenizer", files.tokenizer), ("dataset", files.dataset)):
        found = preflight.findings(name, check, context)
        if any(each.state == "failed" for each in found):
            raise Skipped(f"the {name} cannot be read: see above")
    paths = [*files.tokenizer_files(context.config).values()]
    for key in ("dataset", "dataset_val"):
        block = context.config.get(key)
        if isinstance(block, dict):
            paths += files.data_files(block)
            paths += [Path(str(block[name])) for name in ("data_dir",) if block.get(name)]
    if gone := [path for path in paths if not context.here(path)]:
        raise Skipped(f"{gone[0]} is only on the nodes")


def _variables(context: Context) -> dict[str, str]:
    """Where jobs find the hub's datasets. A check downloads nothing."""
    home = context.cluster.root / "hf"
    return {
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_DATASETS_CACHE": str(home / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
