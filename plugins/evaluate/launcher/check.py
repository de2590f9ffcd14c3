"""The check of a suite before the queue: all samples of its tasks are read."""

from collections.abc import Iterator
from pathlib import Path

from launcher.check import Context, Finding, Skipped, failed, files, ok, skipped
from launcher.check.recipe import ask_trainer
from launcher.check.samples import variables_of_jobs

SUBJECT = "suite"


def samples(context: Context) -> Iterator[Finding]:
    """Let the evaluation read the samples; nothing is found of another entry."""
    if context.recipe.entry.purpose != "evaluate":
        return
    tasks = context.config["tasks"].values()
    blocks = [task["dataset"] for task in tasks if task.get("dataset")]
    named = [Path(str(task["data"])) for task in tasks if task.get("data")]
    named += [path for block in blocks for path in files.data_files(block)]
    if gone := [path for path in named if not context.here(path)]:
        raise Skipped(f"{gone[0]} is only on the nodes")
    config = context.recipe.train_config(context.cluster.root, "run")
    (answer,) = ask_trainer(
        [config], variables=variables_of_jobs(context), module="plugins.evaluate.samples"
    )
    on_hub = any(map(files.on_hub, blocks))
    for fault in answer["faults"]:
        away = on_hub and "cannot be opened" in fault
        yield skipped(SUBJECT, fault) if away else failed(SUBJECT, fault)
    for name, count in answer["samples"].items():
        yield ok(SUBJECT, f"tasks.{name}: {count:,} samples")
