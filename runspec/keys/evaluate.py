"""The keys of `entry: eval`: which models are asked, how they answer, and the tasks of a suite."""

from collections.abc import Iterator, Mapping
from typing import Any

from runspec.keys.key import REQUIRED, Fault, Key, faults

METRICS = ("exact_match", "f1", "rouge1", "rouge2", "rougeL", "classification", "regex", "schema")

_KEYS = (
    Key("candidate", "text", "Folder of the model to evaluate; cookbook eval sets it.", REQUIRED),
    Key("candidate_name", "text", "Its name in the table."),
    Key("against", "text", "Folder of the model that it is compared with."),
    Key("against_name", "text", "Its name in the table."),
    Key("results", "text", "Folder that gets the result, beside the evaluated run."),
    Key("training_data", "texts", "JSON lines files in which the samples are searched."),
    Key("seed", "count", "Seed of sampling, of the bootstrap and of the permutations.", 0),
    Key("dtype", "bf16 | fp16 | fp32", "Type of the weights.", "fp32"),
    Key("device", "auto | cpu | cuda", "Where the models run.", "auto"),
    Key("batch_size", "positive", "Samples that are answered together.", 8),
    Key("shard_samples", "positive", "Samples after which results are saved.", 64),
    Key("max_new_tokens", "positive", "Longest answer, in tokens.", 128),
    Key("temperature", "rate", "0: greedy decoding.", 0),
    Key("top_p", "number", "Share of probability that is sampled from, if temperature > 0.", 1.0),
    Key("template", "chat | none", "The model's chat template, or the text as it is.", "chat"),
    Key("resamples", "positive", "Bootstrap resamples, and permutations of a paired test.", 2000),
    Key("confidence", "number", "Of the intervals.", 0.95),
    Key("tasks", "open block", "The tasks by name.", REQUIRED),
)
EVAL = {key.name: key for key in _KEYS}

_TASK = (
    Key("kind", "perplexity | generation | judge | lm_eval | batch", "What is done.", REQUIRED),
    Key("data", "text", "JSON lines, one sample each."),
    Key("prompt", "text", "Column of the prompt.", "question"),
    Key("reference", "text", "Column of the right answer.", "answer"),
    Key("group", "text", "Column by which the figures are given as well."),
    Key("limit", "positive", "Only the first samples."),
    Key("system", "text", "System message of every prompt."),
    Key("metrics", "texts", f"Of generation: {', '.join(METRICS)}.", ["exact_match", "f1"]),
    Key("labels", "texts", "Of classification: the labels; default: those of the references."),
    Key("regex", "text", "Of the metric regex: what an answer must hold."),
    Key("schema", "any", "Of the metric schema: a JSON schema, or the path of one."),
    Key("output", "text", "Of batch: JSON lines file that gets the answers, in order."),
    Key("judge_url", "text", "Of judge: address of an OpenAI server, such as http://host:8000/v1."),
    Key("judge_model", "text", "Of judge: the model's name there."),
    Key("judge_key_file", "text", "Of judge: file of the API key."),
    Key("tasks", "texts", "Of lm_eval: names of tasks."),
    Key("include_path", "text", "Of lm_eval: folder of task YAML files of your own."),
    Key("num_fewshot", "count", "Of lm_eval: examples before each prompt."),
)
TASK = {key.name: key for key in _TASK}


def task_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of a suite's tasks, which the table of keys does not see."""
    tasks = config.get("tasks")
    if not isinstance(tasks, dict):
        return
    if not tasks:
        yield Fault("tasks", "tasks is empty: name at least one task")
    for name, task in tasks.items():
        where = f"tasks.{name}"
        if not isinstance(task, dict):
            yield Fault(where, f"{where} must be a block of 'key: value' lines, got {task!r}")
            continue
        if "." in str(name) or "/" in str(name):
            yield Fault(where, f"the task name {name!r} may hold no '.' and no '/'")
        for fault in faults(task, TASK):
            yield Fault(f"{where}.{fault.key}", f"{fault.text} in {where}")
        yield from _needs(where, task)


def _needs(where: str, task: Mapping[str, Any]) -> Iterator[Fault]:
    kind, metrics = task.get("kind"), task.get("metrics") or []
    if kind in ("perplexity", "generation", "judge", "batch") and not task.get("data"):
        yield Fault(f"{where}.data", f"{where}.data is missing: name a file of JSON lines")
    if kind == "batch" and not task.get("output"):
        yield Fault(f"{where}.output", f"{where}.output is missing: name the file of the answers")
    if kind == "judge" and not (task.get("judge_url") and task.get("judge_model")):
        yield Fault(where, f"{where} needs judge_url and judge_model")
    if kind == "lm_eval" and not task.get("tasks"):
        yield Fault(where, f"{where}.tasks is missing: name tasks of lm-evaluation-harness")
    for name in metrics if isinstance(metrics, list) else ():
        if name not in METRICS:
            known = ", ".join(METRICS)
            yield Fault(f"{where}.metrics", f"{where}.metrics holds {name!r}, not one of {known}")
        if name in ("regex", "schema") and not task.get(name):
            yield Fault(f"{where}.{name}", f"{where}.{name} is missing, which its metric needs")
