"""An evaluation's result as a table: base against tuned, with intervals and p-values."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.look.report import Section
from launcher.look.text import is_number, plain
from launcher.run.directory import Run
from plugins.evaluate.recipe_keys import COMPARED, COMPARED_OF_TASK, EVAL, TASK
from runspec import files

# Width of a sample, and samples of each task in a report.
_WIDEST, _REPORTED = 100, 3


def results_of(run: Run) -> list[dict[str, Any]]:
    """Return the results in a run: an evaluation's own, or those of its model; newest first."""
    return results_in(run.path / files.EVALS)


def report_section(run: Run) -> Section:
    """Return the evaluations of a run's model, newest first, for a report."""
    texts = ("\n".join(lines(each, _REPORTED)) for each in results_of(run))
    return Section("Evaluations", "\n\n".join(texts).splitlines())


def results_in(folder: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, newest first, each with its file."""
    known = [{**files.peek(path), "file": str(path)} for path in folder.glob("*.json")]
    results = [each for each in known if isinstance(each.get("tasks"), dict)]
    return sorted(results, key=lambda each: float(each.get("created") or 0), reverse=True)


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the candidate's figures of an evaluation by suite.task.metric."""
    values = {}
    tasks = result.get("tasks")
    for task, block in tasks.items() if isinstance(tasks, dict) else ():
        for metric, groups in (block.get("metrics") or {}).items():
            value: Any = ((groups.get("all") or {}).get("candidate") or {}).get("value")
            if is_number(value):
                values[f"{result.get('suite')}.{task}.{metric}"] = float(value)
    return values


def answered(block: Mapping[str, Any]) -> int:
    """Return how many samples of a task the model answered, those that were too long left out."""
    return int(block.get("samples") or 0) - int((block.get("too_long") or {}).get("candidate") or 0)


def compared_settings(
    result: Mapping[str, Any], block: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each compared setting: its key, its default, and its value in an evaluation."""
    for keys, table, values in (
        (COMPARED, EVAL, result.get("settings") or {}),
        (COMPARED_OF_TASK, TASK, block.get("settings") or {}),
    ):
        for key in keys:
            yield key, table[key].default, values.get(key)


def as_gates(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a gates file that make an evaluation the one that counts."""
    yield "evaluations:"
    for task, block in (result.get("tasks") or {}).items():
        if not block.get("data_sha256"):
            continue
        yield f"  {result.get('suite')}.{task}:"
        yield f"    data_sha256: {block['data_sha256']}"
        yield f"    min_samples: {answered(block)}"
        own = {
            key: value
            for key, default, value in compared_settings(result, block)
            if value != default
        }
        if own:
            yield f"    settings: {json.dumps(own)}"


def lines(result: Mapping[str, Any], samples: int = 0) -> Iterator[str]:
    """Yield a result for people to read.

    Args:
        samples: how many samples with different answers are shown side by side.
    """
    ours = result.get("candidate") or {}
    theirs = result.get("against")
    yield plain(f"{result.get('suite')}: {ours.get('name')}" + _versus(theirs))
    settings = result.get("settings") or {}
    share = 100 * float(settings.get("confidence") or 0)
    yield (
        f"seed {settings.get('seed')}, {settings.get('dtype')}, {_decoding(settings)}, template "
        f"{settings.get('template')}; intervals at {share:g}%"
    )
    rows = [["TASK", "METRIC", "GROUP", "N", "THIS MODEL", *(_COMPARED if theirs else [])]]
    for task, block in (result.get("tasks") or {}).items():
        for metric, groups in (block.get("metrics") or {}).items():
            for group, figures in groups.items():
                count = figures.get("samples", block.get("samples", ""))
                row = [task, metric, group, str(count), _value(figures.get("candidate"))]
                if theirs:
                    row += _compared(figures)
                rows.append(row)
    if len(rows) == 1:
        return
    yield ""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield plain("  ".join(cells).rstrip())
    yield from _notes(result)
    yield from _differing(result, samples)


_COMPARED = ["OTHER MODEL", "DIFFERENCE", "P"]


def _versus(theirs: Mapping[str, Any] | None) -> str:
    return f" against {theirs.get('name')}" if theirs else ""


def _decoding(settings: Mapping[str, Any]) -> str:
    heat = float(settings.get("temperature") or 0)
    text = f"temperature {heat:g}, top_p {settings.get('top_p')}" if heat else "greedy"
    return f"{text}, at most {settings.get('max_new_tokens')} new tokens"


def _value(figures: Any) -> str:
    if not isinstance(figures, dict) or not isinstance(figures.get("value"), int | float):
        return "-"
    text = f"{figures['value']:.4g}"
    if figures.get("low") is not None:
        text += f" [{figures['low']:.4g}, {figures['high']:.4g}]"
    elif figures.get("stderr"):
        text += f" +- {float(figures['stderr']):.2g}" if is_number(figures["stderr"]) else ""
    return text


def _compared(figures: Mapping[str, Any]) -> list[str]:
    change = figures.get("difference")
    p = (change or {}).get("p", figures.get("p"))
    shown = "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
    return [_value(figures.get("against")), _value(change), shown]


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    for task, block in (result.get("tasks") or {}).items():
        overlaps = block.get("contamination")
        if overlaps and overlaps.get("not_searched"):
            yield f"{task}: the training set was not searched: {overlaps['not_searched']}"
        elif overlaps:
            overlap = next((v for k, v in overlaps.items() if k.startswith("overlap")), 0)
            yield (
                f"{task}: of {overlaps['samples']:,} samples the training set contains "
                f"{overlaps['exact']:,} exactly, and shares 13 consecutive words with {overlap:,}"
            )
        for side, count in (block.get("too_long") or {}).items():
            if count:
                yield f"{task}: {count:,} samples are too long ({side}): scored as wrong"
        if block.get("kind") == "perplexity" and result.get("against"):
            yield f"{task}: the difference is in nats per token"


def _differing(result: Mapping[str, Any], samples: int) -> Iterator[str]:
    for task, block in (result.get("tasks") or {}).items():
        differing = block.get("differing")
        if not differing or not samples:
            continue
        yield f"\n{task}: {differing['count']:,} answers differ"
        for each in differing["first"][:samples]:
            yield plain(f"  prompt     {_cut(each['prompt'])}")
            yield plain(f"  reference  {_cut(each['reference'])}")
            yield plain(f"  this       {_cut(each['candidate'])}")
            yield plain(f"  other      {_cut(each['against'])}")
            yield ""


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
