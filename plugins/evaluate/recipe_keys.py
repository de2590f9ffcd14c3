"""The keys of `entry: eval`: which models are asked, how they answer, and the tasks of a suite."""

from collections.abc import Iterator, Mapping
from typing import Any

from runspec.keys.key import REQUIRED, Fault, Key, faults, table

METRICS = ("exact_match", "f1", "rouge1", "rouge2", "rougeL", "classification", "regex", "schema")

EVAL = table(
    Key("candidate", "text", "Folder of the model to evaluate; cookbook eval sets it.", REQUIRED),
    Key("candidate_name", "text", "Its name in the table."),
    Key("against", "text", "Folder of the model to compare with."),
    Key("against_name", "text", "Its name in the table."),
    Key("results", "text", "Folder for the result, in addition to the evaluated run."),
    Key(
        "training_data",
        "open block",
        "Dataset block to search for the samples; cookbook eval sets it to the run's dataset.",
    ),
    Key("seed", "count", "Seed of sampling, of the bootstrap and of the permutations.", 0),
    Key("dtype", "bf16 | fp16 | fp32", "Type of the weights.", "fp32"),
    Key("device", "auto | cpu | cuda", "Where the models run.", "auto"),
    Key("batch_size", "positive", "Samples per batch.", 8),
    Key("shard_samples", "positive", "Number of samples between saves of the results.", 64),
    Key("max_new_tokens", "positive", "Maximum answer length in tokens.", 128),
    Key("temperature", "rate", "0: greedy decoding.", 0),
    Key("top_p", "number", "Nucleus sampling probability, if temperature > 0.", 1.0),
    Key(
        "template",
        "chat | none",
        "chat: the model's chat template; none: the text unchanged.",
        "chat",
    ),
    Key("resamples", "positive", "Bootstrap resamples, and permutations of a paired test.", 2000),
    Key("confidence", "number", "Confidence level of the intervals.", 0.95),
    Key("tasks", "open block", "The tasks by name.", REQUIRED),
)

TASK = table(
    Key(
        "kind",
        "perplexity | generation | pair_accuracy | lm_eval",
        "Kind of the task. pair_accuracy: the share of pairs whose chosen answer gets the higher "
        "score of a reward model, or the higher log-probability of a language model.",
        REQUIRED,
    ),
    Key(
        "data",
        "text",
        "File of samples: JSON, CSV or Parquet. cookbook eval finds its columns as start does.",
    ),
    Key(
        "dataset",
        "open block",
        "Dataset block of a recipe, instead of data. Default of cookbook eval: the run's "
        "dataset_val.",
    ),
    Key("prompt", "text", "Column of the prompt.", "question"),
    Key("reference", "text", "Column of the correct answer.", "answer"),
    Key("group", "text", "Column whose groups also get separate figures."),
    Key("limit", "positive", "Number of samples to use, from the first on."),
    Key("system", "text", "System message of every prompt."),
    Key("metrics", "texts", f"For generation: {', '.join(METRICS)}.", ["exact_match", "f1"]),
    Key("labels", "texts", "For classification: the labels. Default: those of the references."),
    Key("regex", "text", "For the metric regex: pattern that an answer must contain."),
    Key("schema", "any", "For the metric schema: a JSON schema, or its path."),
    Key("tasks", "texts", "For lm_eval: names of tasks."),
    Key("include_path", "text", "For lm_eval: folder of your own task YAML files."),
    Key("num_fewshot", "count", "For lm_eval: examples before each prompt."),
)

# What a figure depends on besides the model and the samples: a gate compares these.
COMPARED = (
    *("seed", "dtype", "max_new_tokens", "temperature", "top_p", "template"),
    *("resamples", "confidence"),
)
COMPARED_OF_TASK = (
    *("system", "labels", "regex", "schema", "tasks", "num_fewshot", "include_path"),
)


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
            yield Fault(where, f"the task name {name!r} may not contain '.' or '/'")
        for fault in faults(task, TASK):
            yield Fault(f"{where}.{fault.key}", f"{fault.text} in {where}")
        yield from _needs(where, task)


def _needs(where: str, task: Mapping[str, Any]) -> Iterator[Fault]:
    kind, metrics = task.get("kind"), task.get("metrics") or []
    of_samples = ("perplexity", "generation", "pair_accuracy")
    if kind in of_samples and bool(task.get("data")) == bool(task.get("dataset")):
        given = "and a dataset: leave one out" if task.get("data") else "is missing: name a file"
        yield Fault(f"{where}.data", f"{where}.data {given}")
    if kind == "lm_eval" and not task.get("tasks"):
        yield Fault(where, f"{where}.tasks is missing: name tasks of lm-evaluation-harness")
    for name in metrics if isinstance(metrics, list) else ():
        if name not in METRICS:
            known = ", ".join(METRICS)
            yield Fault(
                f"{where}.metrics",
                f"{where}.metrics contains {name!r}, which is not one of {known}",
            )
        if name in ("regex", "schema") and not task.get(name):
            yield Fault(f"{where}.{name}", f"{where}.{name} is missing: its metric needs it")
