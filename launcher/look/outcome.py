"""What a run was set to, what came of it, and what it cost."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import CookbookError
from launcher.look.status import row
from launcher.look.text import is_number
from launcher.recipe.needs import needs
from launcher.run.directory import Run
from launcher.run.states import State
from runspec import files

# Keys of a recipe that say nothing about what is trained, or differ in every run.
_NOT_SETTINGS = ("output_dir", "description", "prepare", "share", "hub")


def resolved(run: Run) -> dict[str, Any]:
    """Return a run's resolved recipe, {} if it cannot be read."""
    try:
        return yamlfile.load(run.path / files.RECIPE)
    except CookbookError:
        return {}


def configuration(run: Run) -> dict[str, Any]:
    """Return the settings of a run by dotted keys, {} if its recipe cannot be read."""
    return settings(resolved(run))


def settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resolved recipe says of the training, by dotted keys."""
    known = leaves({key: each for key, each in recipe.items() if key not in _NOT_SETTINGS})
    return {key: _own_names(value) for key, value in known}


def _own_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_own_names(each) for each in value]
    return paths.own_name(value) if isinstance(value, str) else value


def leaves(block: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested blocks with its dotted key."""
    for key, value in block.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def outcome(run: Run, state: State, recipe: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what came of a run; None for what is not known.

    GPU-hours count every attempt, lost work included.

    Args:
        recipe: its resolved recipe, if the caller has read it.
    """
    values, progress = row(run, state), run.progress
    metrics = run.metrics
    losses = [each["val_loss"] for each in metrics if is_number(each.get("val_loss"))]
    measured = [each.get("peak_memory_reserved_gb") for each in metrics]
    peaks = [value for value in measured if isinstance(value, int | float)]
    gpus = (values["node_count"] or 0) * (values["gpus_per_node"] or 0)
    # An attempt knows the GPUs of its own allocation.
    attempts = [{"gpus": gpus, **line} for line in run.attempts]
    running = {"gpus": gpus, **run.own_status, "ended": time.time()}
    now = [running] if running.get("state") == "RUNNING" and not state.ended else []
    hours = _gpu_hours([*attempts, *now]) if attempts or now else None
    return {
        "run": run.name,
        "recipe": values["recipe"],
        "cell": run.submission.get("cell"),
        "state": state.word,
        "step": values["step"],
        "val_loss": losses[-1] if losses else None,
        "loss_last_tenth": loss_of_last_tenth(metrics),
        "best_val_loss": progress.get("best_val_loss"),
        "tokens_per_second_per_gpu": values["tokens_per_second_per_gpu"],
        "mfu": values["mfu"],
        "peak_predicted_gib": predicted_gib(
            resolved(run) if recipe is None else recipe,
            values["node_count"],
            values["gpus_per_node"],
        ),
        "peak_measured_gib": max(peaks, default=progress.get("peak_memory_reserved_gb")),
        "used_s": values["used_s"],
        "gpu_hours": None if hours is None else round(hours, 4),
    }


def loss_of_last_tenth(metrics: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean loss of the last 10 % of the steps; None if there is none.

    The loss of a single step is that of its samples: it says little about the run. A logged step
    has the mean since the one before as `loss_mean`, except in runs of earlier versions and of
    other entries.
    """
    losses = {
        each["step"]: each["loss_mean"] if is_number(each.get("loss_mean")) else each["loss"]
        for each in metrics
        if isinstance(each.get("step"), int) and is_number(each.get("loss"))
    }
    begin, before, total, count = 0.9 * max(losses, default=0), 0, 0.0, 0
    for step in sorted(losses):
        if step > begin:
            total += losses[step] * (step - before)
            count += step - before
        before = step
    return total / count if count else None


def predicted_gib(
    recipe: Mapping[str, Any], nodes: int | None, gpus_per_node: int | None
) -> float | None:
    """Return the peak memory per GPU that `cookbook estimate` computes, None if it cannot."""
    if not nodes or not gpus_per_node:
        return None
    try:
        found = needs(recipe, nodes, gpus_per_node)
        return None if found is None else round(found.peak_gib, 3)
    except (CookbookError, KeyError, TypeError, ValueError):
        # The user's own script, a recipe of another version, or one that was edited by hand.
        return None


def _gpu_hours(attempts: Iterable[Mapping[str, Any]]) -> float:
    """Return the GPU-hours of lines of attempts.jsonl, those that brought nothing included.

    A line without times and GPUs, from a broken record, counts nothing.
    """
    used = 0.0
    for line in attempts:
        numbers = [line.get(key) for key in ("started", "ended", "gpus")]
        if all(isinstance(number, int | float) for number in numbers):
            started, ended, gpus = numbers
            used += max(0.0, ended - started) * gpus / 3600  # type: ignore[operator]
    return used
