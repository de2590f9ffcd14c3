"""A data file of the user's own as a dataset block: format and columns come from its records."""

import csv
import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from launcher import venv
from launcher.errors import UsageFault, nearest
from runspec.files import parse_json
from runspec.keys.preference import DpoConfig
from runspec.prepared import EXAMPLE
from runspec.tables import separator

# What reads prompts of a method that samples the answers.
PROMPTS = "trainer.data.prompts.prompt_dataset"
SUFFIXES = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
# Whose turns in a chat are questions.
_ASKING = ("user", "human")
# Number of records that are read to find the format.
_READ = 200
# Usual names of the columns of a question and of its answer; the first that a file has counts.
_INPUTS = ("prompt", "question", "instruction", "input", "query", "user", "problem")
_OUTPUTS = ("completion", "response", "answer", "output", "assistant", "solution", "target")
_OF_PAIRS = ("prompt", "chosen", "rejected", "completion", "label", "tools")
_TEXTS = ("text", "content")
_OF_CHATS = ("messages", "conversations")
_KNOWN = (
    "messages (a list of role and content), conversations (a list of from and value), "
    "instruction + input + output, two columns such as prompt and response, or text"
)


class DataFile(NamedTuple):
    """What was found in a file's first records."""

    # The keys of a dataset block, without packing.
    block: dict[str, Any]
    # One line for the user.
    summary: str


def read(
    name: str,
    column_map: Mapping[str, Any] | None = None,
    pairs: str | None = None,
    task: str = "",
) -> DataFile:
    """Return what a file contains, from its first 200 records.

    Args:
        column_map: {input: COLUMN, output: COLUMN}, if the user names the columns.
        pairs: the component that reads the preferences of a method that trains on them; "" for
            another method, for which they are a fault; None if the method follows from the file.
        task: of a suite, whose keys name the columns; "" for a recipe.

    Raises:
        UsageFault: it cannot be read, or its columns do not say how to train on it.
    """
    path, source, records = _opened(name)
    columns = _columns(records)
    preferences = _preferences(path, columns, column_map, pairs)
    if preferences is None and pairs is None and _are_prompts(columns):
        return prompts(name)
    form, block, used = preferences or _form(path, records, columns, column_map, task)
    unused = ", ".join(name for name in columns if name not in used)
    not_used = f"; not used: {unused}" if unused else ""
    return DataFile(_with_files(block, path, source), f"{path.name} has {form}{not_used}")


def prompts(name: str, column_map: Mapping[str, Any] | None = None) -> DataFile:
    """Return what a file of prompts contains, for a method that samples the answers.

    Every other column goes to the reward functions. Conversations that end with an answer are read
    as for fine-tuning.

    Args:
        column_map: {prompt: COLUMN}, if the user names it.

    Raises:
        UsageFault: it cannot be read, or no column is known to be the prompt.
    """
    path, source, records = _opened(name)
    columns = _columns(records)
    by_lower = {column.lower(): column for column in reversed(columns)}
    known = [by_lower[each] for each in _INPUTS if each in by_lower]
    chats = [column for column in columns if _turns(records, column)]
    named = str((column_map or {}).get("prompt") or "")
    if named and named not in columns:
        raise UsageFault(f"dataset.column_map names {named}, and {path} has {', '.join(columns)}")
    column = next(iter([*([named] if named else []), *known, *chats]), None)
    if column is None:
        raise UsageFault(
            f"{path} has the columns {', '.join(columns)}, and none of {', '.join(_INPUTS)} or "
            f"messages: name the prompt: dataset.column_map='{{prompt: {columns[0]}}}'"
        )
    turns = _turns(records, column)
    if turns and (turns[-1].get("role") or turns[-1].get("from")) not in _ASKING:
        return read(name, None, "")
    block: dict[str, Any] = {"_component_": PROMPTS, "column_map": {"prompt": column}}
    others = ", ".join(each for each in columns if each != column)
    form = f"prompts (column {column})"
    form += f", and for the reward functions {others}" if others else ""
    return DataFile(_with_files(block, path, source), f"{path.name} has {form}")


def _are_prompts(columns: list[str]) -> bool:
    """Whether a file has questions and nothing that could be their answers, or a text to train."""
    lower = {column.lower() for column in columns}
    return bool(lower & set(_INPUTS)) and not lower & {*_OUTPUTS, *_TEXTS, *_OF_CHATS}


def _turns(records: list[dict[str, Any]], column: str) -> list[dict[str, Any]] | None:
    """The turns in the first record that has any in a column."""
    value = next((record[column] for record in records if record.get(column)), None)
    known = isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value)
    return value if known else None


def _columns(records: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for record in records for column in record))


def _with_files(block: dict[str, Any], path: Path, source: str) -> dict[str, Any]:
    block = {**block, "source": source, "data_files": str(path), "split": "train"}
    if source == "csv" and (between := separator(path)) != ",":
        block["sep"] = between
    return block


def _opened(name: str) -> tuple[Path, str, list[dict[str, Any]]]:
    """Return the path of a file, its kind, and its first records; UsageFault if it has none."""
    path = Path(name).expanduser().absolute()
    source = SUFFIXES.get(path.suffix.lower())
    if path.suffix in (".yaml", ".yml"):
        raise UsageFault(
            f"{name} is a recipe or a config, and no data file: start it with cookbook submit "
            f"{shlex.quote(name)}; for a recipe of your own see docs/coming_from.md"
        )
    if path.is_dir() or source is None:
        kind = "is a folder" if path.is_dir() else "is no data file"
        raise UsageFault(
            f"{name} {kind}: its name must end in one of {', '.join(SUFFIXES)}; or give {EXAMPLE}"
        )
    if not path.exists():
        siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        again = f"give an existing one, or {EXAMPLE}"
        raise UsageFault(f"there is no file {path}{nearest(path.name, siblings)}: {again}")
    try:
        records = list(islice(records_of(path, source), _READ))
    except UnicodeDecodeError as error:
        raise UsageFault(f"{path} is not UTF-8 text: save it as UTF-8") from error
    except (OSError, csv.Error, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageFault(f"{path} cannot be read: {why.splitlines()[0]}") from error
    if not records:
        raise UsageFault(f"{path} has no record: give a file with data")
    return path, source, records


def records_of(path: Path, source: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of a kind in SUFFIXES; of Parquet the first 200."""
    if source == "parquet":
        yield from _parquet_records(path)
        return
    # A byte order mark is no part of the first column's name.
    with path.open(encoding="utf-8-sig", newline="") as file:
        if source == "csv":
            rows = csv.DictReader(file, delimiter=separator(path))
            yield from ({str(k): v for k, v in row.items()} for row in rows)
        elif source == "text":
            yield from ({"text": line.rstrip("\n")} for line in file if line.strip())
        else:
            yield from _json_records(file)


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    """The first records, by another process: pyarrow takes long to import."""
    path.open("rb").close()
    done = venv.run_module("trainer.data.head", str(path), str(_READ))
    if done.returncode != 0:
        raise ValueError((done.stderr.strip().splitlines() or ["no message"])[-1])
    yield from map(parse_json, done.stdout.splitlines())


def _json_records(file: Any) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines, or of one JSON array."""
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    for number, line in lines:
        if line.lstrip().startswith("["):
            file.seek(0)
            values: Any = parse_json(file.read().lstrip("\ufeff"))
            yield from (value for value in values if isinstance(value, dict))
            return
        try:
            value = parse_json(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise ValueError(f"line {number} is not a JSON object")
        yield value


def _form(
    path: Path,
    records: list[dict[str, Any]],
    columns: list[str],
    column_map: Mapping[str, Any] | None,
    task: str,
) -> tuple[str, dict[str, Any], set[str]]:
    """Return the format in words, the block, and the columns that it uses."""
    if column_map:
        named = {str(column_map.get(role)) for role in ("input", "output")}
        if absent := sorted(named - set(columns)):
            where = f"tasks.{task}" if task else "dataset.column_map"
            raise UsageFault(
                f"{where} names {', '.join(absent)}, and {path} has {', '.join(columns)}"
            )
        return _pair(str(column_map["input"]), str(column_map["output"]))
    by_lower = {column.lower(): column for column in reversed(columns)}
    for column in columns:
        value = next((r[column] for r in records if r.get(column)), None)
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and {"role", "content"} <= first.keys():
            return _chat(column, "openai", "role and content")
        if isinstance(first, dict) and {"from", "value"} <= first.keys():
            return _chat(column, "sharegpt", "from and value")
    if {"instruction", "input", "output"} <= by_lower.keys():
        alpaca = {name: by_lower[name] for name in ("instruction", "input", "output")}
        block = {
            "_component_": "torchtune.datasets.alpaca_dataset",
            "column_map": alpaca,
            "train_on_input": False,
        }
        return "instructions (instruction, input, output)", block, set(alpaca.values())
    inputs = [by_lower[name] for name in _INPUTS if name in by_lower]
    outputs = [by_lower[name] for name in _OUTPUTS if name in by_lower]
    if inputs and outputs:
        return _pair(inputs[0], outputs[0])
    if texts := [by_lower[name] for name in _TEXTS if name in by_lower]:
        block = {"_component_": "torchtune.datasets.text_completion_dataset", "column": texts[0]}
        return f"plain text (column {texts[0]}), all of it trained", block, {texts[0]}
    names = f"dataset.column_map='{{input: {columns[0]}, output: {columns[-1]}}}'"
    if task:
        names = f"tasks.{task}.prompt={columns[0]} tasks.{task}.reference={columns[-1]}"
    raise UsageFault(
        f"{path} has the columns {', '.join(columns)}, and the kit knows {_KNOWN}: rename them, or "
        f"name the two to use: {names}"
    )


def _preferences(
    path: Path, columns: list[str], column_map: Mapping[str, Any] | None, pairs: str | None
) -> tuple[str, dict[str, Any], set[str]] | None:
    """As `_form`, for pairs of answers, or answers with labels; None if the file has none."""
    names = {**{name: name for name in _OF_PAIRS}, **(column_map or {})}
    used = {name for name in names.values() if name in columns}
    two = {names["chosen"], names["rejected"]} <= used
    labelled = {names["prompt"], names["completion"], names["label"]} <= used
    if pairs == "" and two and not column_map:
        raise UsageFault(
            f"{path} has pairs of answers, and this recipe trains by supervised fine-tuning: use "
            "a recipe with entry: dpo, such as llama8b_dpo, or set entry=dpo; to train one of the "
            "answers alone, name it: dataset.column_map='{input: prompt, output: chosen}'"
        )
    if not pairs and not (pairs is None and two):
        return None
    is_single = pairs is not None and pairs.endswith("UnpairedPreferenceDataset")
    if not (two or (is_single and labelled)):
        single = ", or prompt, completion and label" if is_single else ""
        raise UsageFault(
            f"{path} has the columns {', '.join(columns)}, and the recipe trains on preferences: "
            f"it needs chosen and rejected{single}; name others by "
            "dataset.column_map='{chosen: COLUMN, rejected: COLUMN}'"
        )
    # Wrong records of a user's own file are faults, unless the user says so by this key.
    block: dict[str, Any] = {"_component_": pairs or DpoConfig.pairs, "drop_invalid": False}
    if column_map:
        block["column_map"] = dict(column_map)
    form = "pairs of answers" if two else "answers with labels"
    return f"{form} (columns {', '.join(n for n in columns if n in used)})", block, used


def _pair(question: str, answer: str) -> tuple[str, dict[str, Any], set[str]]:
    block = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "column_map": {"input": question, "output": answer},
        "train_on_input": False,
    }
    form = f"questions and answers (columns {question} and {answer}), the answers trained"
    return form, block, {question, answer}


def _chat(column: str, style: str, parts: str) -> tuple[str, dict[str, Any], set[str]]:
    block = {
        "_component_": "torchtune.datasets.chat_dataset",
        "conversation_column": column,
        "conversation_style": style,
        "train_on_input": False,
    }
    return f"chats (column {column}: {parts}), the answers trained", block, {column, "tools"}
