"""The first samples of a recipe's data, as the trainer reads, cuts and packs them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.check import Context, Finding, Skipped, failed, files, findings, ok, skipped, warning
from launcher.check.recipe import ask_for_samples
from launcher.errors import UsageFault

SUBJECT = "samples"
# Of JSON lines, the datasets library converts about 100 MB per second.
SMALL_BYTES = 100e6


def counted(context: Context) -> Iterable[Finding]:
    """Tokenise the first samples of files that are small enough to take no time."""
    if context.recipe.entry.method is None:
        raise Skipped("the kit's trainer does not read the data")
    _check_readable(context)
    _check_small(context, _paths(context))
    datasets, faults = ask_for_samples(context, 0, variables_of_jobs(context))
    for dataset in datasets:
        yield from _counted(dataset)
    yield from (_finding(context, fault) for fault in faults)


def read(context: Context, count: int) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Return the faults of a recipe's samples, and of each dataset what the trainer shows.

    count: how many samples of each dataset are shown.
    UsageFault if the recipe's entry is not the kit's trainer.
    """
    recipe = context.recipe
    if recipe.entry.method is None:
        raise UsageFault(
            f"--samples: {recipe.name} starts {recipe.entry_name}, and only data of the kit's own "
            "trainer can be shown: leave --samples out"
        )
    shown: list[dict[str, Any]] = []

    def look(context: Context) -> Iterable[Finding]:
        _check_readable(context)
        datasets, faults = ask_for_samples(context, count, variables_of_jobs(context))
        shown.extend(datasets)
        return [_finding(context, fault) for fault in faults]

    return findings(SUBJECT, look, context), shown


def _counted(dataset: dict[str, Any]) -> Iterator[Finding]:
    """What was counted of a dataset that is not shown, and what its chat template leaves out."""
    key, read = dataset["key"], dataset["read"]
    if not dataset["faulty"]:
        which = "all" if read == dataset["samples"] else "the first"
        lost = f"{dataset['truncated']:,} truncated, {dataset['dropped']:,} dropped"
        yield ok(SUBJECT, f"{key}: {which} {read:,} samples can be tokenised, {lost}")
    for note in dataset["notes"]:
        yield warning(SUBJECT, f"{key}: {note}")


def _finding(context: Context, fault: str) -> Finding:
    """A fault of the data; that a dataset of the hub is not downloaded yet is none."""
    key, _, message = fault.partition(": ")
    block = context.config.get(key)
    if message.startswith("cannot be opened") and isinstance(block, dict) and files.on_hub(block):
        name = block.get("source") or "its dataset"
        remedy = f"cookbook download {context.recipe.given_name}"
        return skipped(SUBJECT, f"{key}: {name} is not on this machine", remedy)
    return failed(SUBJECT, fault)


def _check_readable(context: Context) -> None:
    """Skip what another check has found not to be there, or what only the nodes have."""
    if not context.prepared:
        raise Skipped("the model is made at submission, and its tokenizer with it")
    for name, check in (("tokenizer", files.tokenizer), ("dataset", files.dataset)):
        results = findings(name, check, context)
        for fault in (each for each in results if each.state == "failed"):
            raise Skipped(f"the {name} cannot be read: {fault.message}")
    paths = [*files.tokenizer_files(context.config).values(), *_paths(context)]
    if gone := [path for path in paths if not context.here(path)]:
        raise Skipped(f"{gone[0]} is only on the nodes")


def _blocks(context: Context) -> list[dict[str, Any]]:
    return [whole for _, _, whole in files.dataset_blocks(context.config)]


def _paths(context: Context) -> list[Path]:
    """The files of the recipe's datasets, and the folders of prepared sets."""
    named = [path for block in _blocks(context) for path in files.data_files(block)]
    folders = [block["data_dir"] for block in _blocks(context) if block.get("data_dir")]
    return [*named, *(Path(str(folder)) for folder in folders)]


def _check_small(context: Context, paths: Iterable[Path]) -> None:
    """Skip data that are not only files, or whose conversion by the datasets library takes long."""
    show = "their first samples are read with: --samples 1"
    if any(map(files.on_hub, _blocks(context))) or not paths:
        raise Skipped(f"the data are not files on this machine; {show}")
    inner = [each for path in paths for each in (path.iterdir() if path.is_dir() else [path])]
    size = sum(path.stat().st_size for path in inner)
    if size > SMALL_BYTES:
        raise Skipped(f"the data are {size / 2**30:.1f} GiB; {show}")


def variables_of_jobs(context: Context) -> dict[str, str]:
    """Return where jobs find the hub's datasets. A check downloads nothing."""
    home = context.cluster.root / "hf"
    return {
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_DATASETS_CACHE": str(home / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
