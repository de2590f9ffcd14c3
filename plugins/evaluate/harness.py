"""Tasks of lm-evaluation-harness, where it is installed."""

import hashlib
import json
from statistics import NormalDist
from typing import Any

from plugins.evaluate.model import Answerer
from trainer.errors import ConfigError


def evaluate(answerer: Answerer, task: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of lm-evaluation-harness by task and metric, with its standard errors.

    Beside them the number of samples, and a hash of the harness's own hashes of what it asked.

    Raises:
        ConfigError: it is not installed, or does not know a task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        message = "a task of kind lm_eval needs lm-evaluation-harness"
        raise ConfigError(f"{message}: bash setup.sh --with lm-eval") from None
    manager = TaskManager(include_path=task.get("include_path"))
    if unknown := [name for name in task["tasks"] if name not in manager.all_tasks]:
        message = f"lm-evaluation-harness has no task {', '.join(unknown)}"
        raise ConfigError(f"{message}: lm_eval ls tasks lists them; include_path adds your own")
    model = HFLM(
        pretrained=answerer.model, tokenizer=answerer.tokenizer, batch_size=config["batch_size"]
    )
    results = simple_evaluate(
        model=model,
        tasks=list(task["tasks"]),
        num_fewshot=task.get("num_fewshot"),
        limit=task.get("limit"),
        bootstrap_iters=config["resamples"],
        random_seed=config["seed"],
        numpy_random_seed=config["seed"],
        torch_random_seed=config["seed"],
        fewshot_random_seed=config["seed"],
        task_manager=manager,
    )
    logged = results["samples"]
    return {
        "figures": _figures(results["results"], logged, config["confidence"]),
        "samples": sum(map(len, logged.values())),
        "data_sha256": _data_sha256(logged),
    }


def _figures(
    results: dict[str, Any], logged: dict[str, Any], confidence: float
) -> dict[str, dict[str, Any]]:
    """Return the figures by TASK/METRIC, with intervals of a normal distribution."""
    width = NormalDist().inv_cdf((1 + confidence) / 2)
    figures: dict[str, dict[str, Any]] = {}
    for name, block in results.items():
        for metric, value in block.items():
            if not isinstance(value, int | float) or "_stderr" in metric:
                continue
            stem, _, rest = metric.partition(",")
            stderr = block.get(f"{stem}_stderr,{rest}")
            figure = {"value": float(value), "stderr": stderr}
            if isinstance(stderr, int | float):
                figure |= {"low": value - width * stderr, "high": value + width * stderr}
            if name in logged:
                figure["samples"] = len(logged[name])
            figures[f"{name}/{metric.removesuffix(',none')}"] = figure
    return figures


def _data_sha256(logged: dict[str, Any]) -> str:
    """Return a hash of the harness's own hashes of what it asked."""
    asked = ("doc_hash", "prompt_hash", "target_hash")
    hashes = {
        name: sorted("".join(row[key] for key in asked) for row in rows)
        for name, rows in sorted(logged.items())
    }
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
