"""What the tasks of a suite are asked: the user's file, or the validation data of the run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import yamlfile
from launcher.check import files as data_blocks
from launcher.errors import UsageFault
from launcher.recipe import entries, extend, override, own_data
from launcher.recipe.model import Recipe
from launcher.run.directory import Run
from launcher.site import Site
from runspec import files
from runspec.keys.preference import DpoConfig

# The suites of the kit whose samples are the run's own.
OF_ANSWERS, OF_PAIRS = "validation", "pairs"
_ASKING = ("perplexity", "generation", "pair_accuracy")
# Keys of a task that name a file or folder.
_PATHS = ("data", "include_path", "schema")
_INSTRUCT = "torchtune.datasets.instruct_dataset"
_GIVE = "give a file of questions and answers: --data FILE"


def suite_of(run: Run | None) -> str:
    """Return the suite that an evaluation has by default: on pairs for a run trained on pairs."""
    method = entries.of(_config(run)).method if run else None
    return OF_PAIRS if method and method.pairs else OF_ANSWERS


def overrides(
    suite: Path, typed: Sequence[str], data: str | None, run: Run | None
) -> tuple[list[str], tuple[str, ...]]:
    """Return overrides that give every task its samples, and a line that says which they are.

    Args:
        suite: its file. data: a file for all tasks, instead of what they name.

    Raises:
        UsageFault: a task names none, and there is no run, or it has no validation data; or a file
            is given that no task reads.
    """
    tasks = extend.read(suite)[0].get("tasks")
    blocks = tasks.items() if isinstance(tasks, dict) else ()
    named = {name: task for name, task in blocks if isinstance(task, dict)}
    asking = {name: task for name, task in named.items() if task.get("kind") in _ASKING}
    others = ", ".join(f"{n} ({task.get('kind')})" for n, task in named.items() if n not in asking)
    if data is not None:
        if not asking:
            raise UsageFault(
                f"--data {data}: no task of {suite} reads samples: {others or 'it has no task'}; "
                f"leave it out, or give a suite of {', '.join(_ASKING)} tasks, such as "
                f"--suite {OF_ANSWERS}"
            )
        notes = (f"--data is not read by these tasks: {others}",) if others else ()
        return [f"tasks.{name}.data={json.dumps(data)}" for name in asking], notes
    keys = {override.key_of(text) for text in typed}
    without = [
        name
        for name, task in asking.items()
        if not (task.get("data") or task.get("dataset"))
        if not {f"tasks.{name}.data", f"tasks.{name}.dataset", f"tasks.{name}"} & keys
    ]
    if not without:
        return [], ()
    if run is None:
        raise UsageFault(f"the model belongs to no run whose validation data it could use: {_GIVE}")
    block = validation_of(run)
    source = block.get("data_files") or block.get("data_dir") or block.get("source")
    names = ", ".join(map(str, source)) if isinstance(source, list) else str(source)
    note = f"the samples are dataset_val of {run.name}: {names}, split {block.get('split')}"
    return [f"tasks.{name}.dataset={json.dumps(block)}" for name in without], (note,)


def validation_of(run: Run) -> dict[str, Any]:
    """Return the dataset block of a run's validation data.

    Raises:
        UsageFault: it has none, or only prompts without answers.
    """
    config = _config(run)
    blocks = [block for key, _, block in data_blocks.dataset_blocks(config) if key == "dataset_val"]
    if not config.get("dataset_val") or not blocks:
        raise UsageFault(f"{run.name} was trained without dataset_val: {_GIVE}")
    method = entries.of(config).method
    if not (method and method.samples_answers):
        return blocks[0]
    rewards = config.get("rewards") or {}
    answers = [str(each["column"]) for each in rewards.values() if each and each.get("column")]
    if not answers:
        raise UsageFault(f"the prompts of {run.name} have no answers to compare with: {_GIVE}")
    prompt = (blocks[0].get("column_map") or {}).get("prompt", "prompt")
    columns = {"input": prompt, "output": answers[0]}
    return {**blocks[0], "_component_": _INSTRUCT, "column_map": columns}


def training_of(run: Run) -> dict[str, Any] | None:
    """Return the dataset block of a run's training data; None if its files are gone."""
    blocks = [
        block for key, _, block in data_blocks.dataset_blocks(_config(run)) if key == "dataset"
    ]
    here = [
        all(path.is_file() for path in data_blocks.data_files(block))
        and (not block.get("data_dir") or Path(str(block["data_dir"])).is_dir())
        for block in blocks
    ]
    return blocks[0] if len(blocks) == 1 and here[0] else None


def with_absolute_paths(
    recipe: Recipe, typed: Iterable[str], site: Site
) -> tuple[dict[str, Any], list[str]]:
    """Return a suite's config for a job that runs in another folder, and its faults.

    A file that was typed counts from the shell's folder, one that the suite names from the suite's.
    A table, and a file with other columns, becomes a dataset block, as `start` makes one.

    Args:
        typed: the keys that were given on the command line.
    """
    faults: list[str] = []
    tasks = {}
    for name, task in (recipe.config.get("tasks") or {}).items():
        task = dict(task)
        for key in _PATHS:
            if _is_path(task.get(key)):
                given = f"tasks.{name}.{key}" in typed
                task[key] = _absolute(task[key], recipe.path.parent, given)
        on_nodes = [Path(str(task.get("data"))).is_relative_to(each) for each in site.node_paths]
        if _is_path(task.get("data")) and not any(on_nodes):
            try:
                block = _block(name, task)
                task |= {"data": None, "dataset": block} if block else {}
            except UsageFault as fault:
                faults += fault.faults
        tasks[name] = task
    return {**recipe.config, "tasks": tasks}, faults


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "${" not in value and not value.lstrip().startswith("{")


def _absolute(value: str, folder: Path, typed: bool) -> str:
    here = Path.cwd() / Path(value).expanduser()
    beside = folder.absolute() / Path(value).expanduser()
    return str(beside if not typed and (beside.exists() or not here.exists()) else here)


def _block(name: str, task: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the dataset block of a task's file; None for JSON lines that are read as they are.

    Raises:
        UsageFault: it is not there, cannot be read, or its columns do not say what they are.
    """
    path = Path(task["data"])
    if not path.is_file():
        raise UsageFault(f"tasks.{name}.data: there is no file {path}: set tasks.{name}.data=")
    if task["kind"] not in _ASKING:
        return None
    columns = {
        "input": task.get("prompt") or "question",
        "output": task.get("reference") or "answer",
    }
    is_pair = task["kind"] == "pair_accuracy"
    if path.suffix.lower() in (".jsonl", ".ndjson") and (is_pair or _has(path, columns.values())):
        return None
    chosen = bool(task.get("prompt") or task.get("reference")) and not is_pair
    pairs = DpoConfig.pairs if is_pair else ""
    try:
        return own_data.read(str(path), columns if chosen else None, pairs, name).block
    except UsageFault as fault:
        raise UsageFault([f"tasks.{name}.data: {text}" for text in fault.faults]) from None


def _has(path: Path, wanted: Iterable[str]) -> bool:
    """Whether the first record has the columns, or messages; False if it cannot be read."""
    try:
        first = next(own_data.records_of(path, "json"), {})
    except (OSError, ValueError):
        return False
    return set(wanted) <= first.keys() or isinstance(first.get("messages"), list)


def _config(run: Run) -> dict[str, Any]:
    return yamlfile.load(run.path / files.RECIPE)
