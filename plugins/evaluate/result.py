"""The result of an evaluation: every metric of both models, by group, and the samples."""

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from plugins.evaluate import samples, scores
from plugins.evaluate.model import fingerprint
from plugins.evaluate.recipe_keys import COMPARED
from plugins.evaluate.samples import Sample
from plugins.evaluate.shards import Plan
from plugins.evaluate.statistics import difference, interval
from runspec import files
from runspec.files import patient_json
from runspec.weights import content_sha256
from trainer.errors import ConfigError

# Samples whose answers differ that the result itself shows; all are in the file of samples.
_SHOWN = 20


def write(plan: Plan, config: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Write evals/<suite>.json and evals/<suite>.samples.jsonl, and copy them to `results`.

    Raises:
        ConfigError: a model's files changed while it was evaluated.
    """
    suite = str((patient_json(run_dir / files.SUBMISSION) or {}).get("recipe") or "suite")
    lines: list[dict[str, Any]] = []
    tasks = {}
    for name, task in config["tasks"].items():
        if task["kind"] == "lm_eval":
            tasks[name] = _of_harness(plan, name)
        else:
            tasks[name], own_lines = _of_samples(plan, name, task, config)
            lines += own_lines
        tasks[name]["settings"] = plan.task_settings[name]
    result = {
        "suite": suite,
        "run": run_dir.name,
        "created": time.time(),
        **{side: _model(plan, side) for side in plan.sides},
        "settings": {key: config[key] for key in (*COMPARED, "batch_size")},
        "tasks": tasks,
    }
    folder = run_dir / files.EVALS
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.write_text(folder / f"{suite}.samples.jsonl", text)
    files.write_json(folder / f"{suite}.json", result)
    if config.get("results"):
        target = Path(config["results"])
        target.mkdir(parents=True, exist_ok=True)
        for kind in ("samples.jsonl", "json"):
            # One evaluation replaces no other: each has its run in its name.
            final = target / f"{suite}--{run_dir.name}.{kind}"
            with files.replacing(final) as temporary:
                shutil.copyfile(folder / f"{suite}.{kind}", temporary)
    return result


def _model(plan: Plan, side: str) -> dict[str, Any]:
    folder = plan.folder(side)
    name = plan.config.get(f"{side}_name") or folder.name
    weights_sha256 = content_sha256(folder)
    if fingerprint(folder) != plan.models[side]:
        raise ConfigError(
            f"{side}: files in {folder} changed while it was evaluated: start the evaluation again"
        )
    return {"name": name, "folder": str(folder.resolve()), "weights_sha256": weights_sha256}


def _of_samples(
    plan: Plan, name: str, task: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rows = {side: plan.all_rows(name, side) for side in plan.sides}
    data = plan.data[name]
    result: dict[str, Any] = {"kind": task["kind"], "samples": len(data)}
    result["data_sha256"] = samples.sha256(data)
    result["too_long"] = {
        side: sum(bool(row.get("too_long")) for row in rows[side]) for side in plan.sides
    }
    if config.get("training_data"):
        result["contamination"] = samples.contamination(data, config["training_data"])
    columns = _columns(task, data, rows)
    result["metrics"] = {
        metric: _groups(metric, sides, data, config) for metric, sides in columns.items()
    }
    lines = []
    for k, sample in enumerate(data):
        line: dict[str, Any] = {"task": name, "index": sample.index, "group": sample.group}
        line |= {"prompt": sample.prompt, "reference": sample.reference}
        for side in plan.sides:
            line[side] = rows[side][k] | {
                metric: float(values[side][0][k]) for metric, values in columns.items()
            }
        lines.append(line)
    if len(plan.sides) == 2 and task["kind"] == "generation":
        differ = [
            line for line in lines if line["candidate"]["answer"] != line["against"]["answer"]
        ]
        result["differing"] = {"count": len(differ), "first": [_side(x) for x in differ[:_SHOWN]]}
    return result, lines


def _side(line: dict[str, Any]) -> dict[str, str]:
    answers = {side: line[side]["answer"] for side in ("candidate", "against")}
    return {"prompt": line["prompt"], "reference": line["reference"], **answers}


Columns = dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]


def _columns(
    task: dict[str, Any], data: list[Sample], rows: dict[str, list[dict[str, Any]]]
) -> Columns:
    """Return by metric and model (samples,) sums and (samples,) weights."""
    own = {"perplexity": ["perplexity"], "pair_accuracy": ["accuracy"]}
    return {
        metric: {
            side: _sums_and_weights(metric, task, data, side_rows)
            for side, side_rows in rows.items()
        }
        for metric in own.get(task["kind"], task["metrics"])
    }


def _sums_and_weights(
    metric: str, task: dict[str, Any], data: list[Sample], rows: list[dict[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    if metric == "perplexity":
        return (
            np.array([row["nll"] for row in rows], float),
            np.array([row["tokens"] for row in rows], float),
        )
    if metric == "accuracy":
        sums = [float(row["chosen"] > row["rejected"]) for row in rows]
    else:
        sums = [
            scores.of_answer(metric, row["answer"], sample.reference, task)
            for row, sample in zip(rows, data, strict=True)
        ]
    return np.array(sums, float), np.ones(len(sums))


def _groups(
    metric: str,
    sides: dict[str, tuple[np.ndarray, np.ndarray]],
    data: list[Sample],
    config: dict[str, Any],
) -> dict[str, Any]:
    """Return the figures of a metric over all samples, and over those of each group."""
    groups = np.array([sample.group for sample in data])
    chosen = {"all": np.ones(len(data), bool)}
    chosen |= {name: groups == name for name in sorted(set(groups.tolist()) - {""})}
    by_group = {}
    for name, mask in chosen.items():
        within = {side: (sums[mask], weights[mask]) for side, (sums, weights) in sides.items()}
        by_group[name] = {"samples": int(mask.sum()), **_figures(metric, within, config)}
    return by_group


def _figures(
    metric: str, sides: dict[str, tuple[np.ndarray, np.ndarray]], config: dict[str, Any]
) -> dict[str, Any]:
    settings = (config["seed"], config["resamples"], config["confidence"])
    # A perplexity is the exponential of a mean, and so are the ends of its interval.
    shown = math.exp if metric == "perplexity" else float
    figures: dict[str, Any] = {}
    for side, (sums, weights) in sides.items():
        if not weights.sum():
            figures[side] = {"value": None}
            continue
        low, high = interval(sums, weights, *settings)
        value = shown(float(sums.sum() / weights.sum()))
        figures[side] = {"value": value, "low": shown(low), "high": shown(high)}
    if len(sides) == 2 and all(each["value"] is not None for each in figures.values()):
        (ours, weights), (theirs, _) = sides["candidate"], sides["against"]
        figures["difference"] = difference(ours, theirs, weights, *settings)
        if metric == "perplexity":
            figures["difference"]["of"] = "mean negative log likelihood per token, in nats"
    return figures


def _of_harness(plan: Plan, name: str) -> dict[str, Any]:
    rows = {side: plan.all_rows(name, side)[0] for side in plan.sides}
    sides = {side: row["figures"] for side, row in rows.items()}
    metrics = {}
    for metric in sides["candidate"]:
        known = {side: figures[metric] for side, figures in sides.items() if metric in figures}
        count = sides["candidate"][metric].get("samples")
        samples = {} if count is None else {"samples": count}
        metrics[metric] = {"all": {**samples, **known}}
    known = {key: rows["candidate"].get(key) for key in ("samples", "data_sha256")}
    return {"kind": "lm_eval", **known, "metrics": metrics}
