"""What can be known on the login node before a job is queued; no fault hides another."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from launcher import slurm
from launcher.cluster import Cluster
from launcher.errors import SlurmFault, nearest
from launcher.recipe import Recipe, time_limit_s
from launcher.render import with_site_defaults

# What sinfo prints for a limit; "infinite" and "n/a" are none.
_TIME = re.compile(r"(?:\d+-)?\d+(?::\d+){0,2}\Z")
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")


def faults(recipe: Recipe, cluster: Cluster, local: bool, prepared: bool = True) -> list[str]:
    """Return all faults, one line each; [] where the run may be queued.

    prepared says that the model's files should be there, not made first by the recipe's prepare.
    """
    config = recipe.resolved(cluster.root, "run")
    found = _layout(recipe, cluster) + _secrets(config, "")
    if prepared:
        found += _model_files(config)
    found += _dataset_files(config)
    if not local:
        found += _scheduler(recipe, cluster)
    return found


def _layout(recipe: Recipe, cluster: Cluster) -> list[str]:
    resources = with_site_defaults(recipe.resources, cluster)
    ranks = resources.world_size
    tensor_parallel = recipe.config.get("tensor_parallel_dim") or 1
    if ranks % tensor_parallel:
        return [
            f"tensor_parallel_dim {tensor_parallel} does not divide {resources.nodes} x "
            f"{resources.gpus_per_node} = {ranks} ranks: change it, or --nodes, or --gpus-per-node"
        ]
    return []


def _secrets(value: Any, where: str) -> list[str]:
    if isinstance(value, dict):
        return [
            fault
            for key, inner in value.items()
            for fault in _secrets(inner, f"{where}.{key}".lstrip("."))
        ]
    if isinstance(value, list):
        return [fault for inner in value for fault in _secrets(inner, where)]
    if isinstance(value, str) and _HUB_TOKEN.search(value):
        return [
            f"{where} holds a Hugging Face token, and a run's files are readable: remove it; use "
            "HF_TOKEN_PATH"
        ]
    return []


def _readable(path: Path) -> str | None:
    """Say why a file or folder cannot be read, None where it can."""
    try:
        if path.is_dir():
            next(path.iterdir(), None)
        else:
            with path.open("rb"):
                pass
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _model_files(config: dict[str, Any]) -> list[str]:
    found = []
    checkpointer = config.get("checkpointer")
    checkpointer = checkpointer if isinstance(checkpointer, dict) else {}
    folder = checkpointer.get("checkpoint_dir")
    if folder:
        why = _readable(Path(folder))
        if why:
            found.append(
                f"checkpointer.checkpoint_dir {folder} {why}: download the model there (the "
                "recipe's header says "
                "how), or set checkpointer.checkpoint_dir="
            )
        else:
            missing = [
                name for name in checkpoint_files(checkpointer) if _readable(Path(folder) / name)
            ]
            if missing:
                found.append(
                    f"checkpointer.checkpoint_dir {folder} lacks {len(missing)} of the recipe's "
                    "checkpoint_files, "
                    f"first {missing[0]}: finish the download, or set "
                    "checkpointer.checkpoint_files="
                )
    tokenizer = config.get("tokenizer")
    for key in ("path", "vocab_path", "merges_file"):
        path = tokenizer.get(key) if isinstance(tokenizer, dict) else None
        why = _readable(Path(path)) if isinstance(path, str) else None
        if why:
            found.append(
                f"tokenizer.{key} {path} {why}: it comes with the model's download, or set "
                f"tokenizer.{key}="
            )
    return found


def checkpoint_files(checkpointer: dict[str, Any]) -> list[str]:
    """Return the names that torchtune's checkpoint_files stands for: a list or a pattern."""
    files = checkpointer.get("checkpoint_files")
    if isinstance(files, dict):
        pattern, last = str(files.get("filename_format", "")), str(files.get("max_filename", ""))
        if not last.isdigit() or pattern.count("{}") != 2:
            return []
        return [pattern.format(str(k).zfill(len(last)), last) for k in range(1, int(last) + 1)]
    return [str(name) for name in files] if isinstance(files, list) else []


# What datasets.load_dataset takes as a source where the data are files.
_FILE_SOURCES = {"json", "csv", "parquet", "text", "arrow"}


def _dataset_files(config: dict[str, Any]) -> list[str]:
    datasets, validation = config.get("dataset"), config.get("dataset_val")
    blocks = [
        ("dataset", block) for block in (datasets if isinstance(datasets, list) else [datasets])
    ]
    # What dataset_val leaves out is dataset's, and told there.
    if isinstance(validation, dict) and {"source", "data_files"} & validation.keys():
        inherited = datasets if isinstance(datasets, dict) else {}
        blocks.append(("dataset_val", {**inherited, **validation}))
    return [
        fault
        for key, block in blocks
        if isinstance(block, dict)
        for fault in _unreadable(key, block)
    ]


def _unreadable(key: str, dataset: dict[str, Any]) -> list[str]:
    found = []
    source, files = dataset.get("source"), dataset.get("data_files")
    if isinstance(files, dict):
        files = [
            name
            for value in files.values()
            for name in (value if isinstance(value, list) else [value])
        ]
    for name in [files] if isinstance(files, str) else files or []:
        # Wildcards and addresses are the datasets library's to open.
        if (
            source in _FILE_SOURCES
            and "://" not in str(name)
            and not re.search(r"[*?\[]", str(name))
        ):
            why = _readable(Path(str(name))) or _unfit(key, Path(str(name)), dataset)
            if why:
                found.append(
                    f"{key}.data_files {name} {why}: mend the path, or set {key}.data_files="
                )
    if isinstance(source, str) and source.startswith(("/", "./", "../", "~")):
        why = _readable(Path(source).expanduser())
        if why:
            found.append(f"{key}.source {source} {why}: mend the path, or set {key}.source=")
    return found


def _unfit(key: str, path: Path, dataset: dict[str, Any]) -> str | None:
    """Say why a file of JSON lines cannot hold the samples, judged by its first line."""
    if path.suffix != ".jsonl":
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), None)
    if first is None:
        return "is empty"
    try:
        sample = json.loads(first)
    except ValueError:
        sample = None
    if not isinstance(sample, dict):
        return "cannot be used: its first line is no JSON object"
    columns = dataset.get("column_map")
    for column in columns.values() if isinstance(columns, dict) else ():
        if column not in sample:
            return f"has no column {column!r} of {key}.column_map, only {', '.join(sample)}"
    return None


def _scheduler(recipe: Recipe, cluster: Cluster) -> list[str]:
    """What Slurm would take and then let wait for ever, or refuse, whatever the nodes' states."""
    resources = with_site_defaults(recipe.resources, cluster)
    try:
        known = slurm.partitions()
    except SlurmFault as fault:
        return fault.faults
    wanted = resources.partition.split(",") if resources.partition else []
    found = [
        f"there is no partition {name!r} on this cluster{nearest(name, known)}: choose one of "
        f"{', '.join(known)} with --partition"
        for name in wanted
        if name not in known
    ]
    chosen = [known[name] for name in wanted if name in known]
    chosen = chosen or [each for each in known.values() if each.default]
    if chosen and all(resources.nodes > each.nodes for each in chosen):
        found.append(
            f"{resources.nodes} nodes are asked for, and {_each(chosen, 'nodes')}: the job would "
            "wait for ever: lower --nodes, or choose another --partition"
        )
    limits = [time_limit_s(each.time_limit) for each in chosen if _TIME.match(each.time_limit)]
    asked = resources.time_s
    if asked and chosen and len(limits) == len(chosen) and asked > max(limits):
        found.append(
            f"a time limit of {resources.time} is asked for, and {_each(chosen, 'time_limit')}: "
            "lower --time (the run goes on in a new job), or choose another --partition"
        )
    return found


def _each(partitions: list[slurm.Partition], what: str) -> str:
    return " and ".join(f"partition {each.name} has {getattr(each, what)}" for each in partitions)
