"""How many samples and tokens an epoch of a recipe has, by the sizes of its local files."""

import csv
import json
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

from launcher.errors import RecipeFault
from launcher.recipe import own_data
from plugins.estimate.launcher.step_config import StepConfig
from runspec.keys.fields import STREAM

# English text, Llama 3's and Qwen's tokenizers: roughly; for an epoch whose tokens nobody counted.
BYTES_PER_TOKEN = 4


def epoch_of(config: Mapping[str, Any], step: StepConfig) -> tuple[int, str, int]:
    """Return the tokens of an epoch, by the size of local files, else a million; what it is; and
    its samples; where they are not known, rows as long as can be, or packed ones full of answers.
    RecipeFault if a file cannot be read.

    Of a stream, which has no epochs, those of the whole run.
    """
    dataset, length, steps = config.get("dataset"), step.length, config.get("max_steps")
    if isinstance(dataset, Mapping) and dataset.get("_component_") == STREAM and steps:
        tokens = int(steps) * step.rows_per_step * length
        return tokens, f"the run's {steps:,} steps, {tokens:,} tokens", tokens // length
    given = dataset.get("data_files") if isinstance(dataset, Mapping) else None
    try:
        files = _local_files(given)
        sizes = [min(size, length * BYTES_PER_TOKEN) for file in files for size in _sizes(file)]
    except OSError as error:
        what = f"{error.filename or given} cannot be read: {error.strerror}"
        raise RecipeFault(f"dataset.data_files: {what}; look at it with: ls -l") from error
    if not sizes:
        each = step.new_tokens if step.packed and step.on_policy_share else length
        why = "the dataset is not a local JSON, CSV or text file"
        return 10**6, f"a million tokens: {why}", 10**6 // each
    tokens = max(sum(sizes) // BYTES_PER_TOKEN, 1)
    text = f"an epoch of {len(sizes):,} samples, about {tokens:,} tokens by file size"
    return tokens, text, len(sizes)


def _local_files(given: Any) -> list[Path]:
    names = given if isinstance(given, list) else [given]
    return [Path(each) for name in names if isinstance(name, str) for each in sorted(glob(name))]


def _sizes(file: Path) -> Iterator[int]:
    """Yield the bytes of each sample of a file; of a kind that cannot be counted nothing."""
    source = own_data.SUFFIXES.get(file.suffix.lower())
    if source is None or source == "parquet" or not file.is_file():
        return
    if source == "csv" or file.suffix == ".json":
        try:
            for record in own_data.records_of(file, source):
                yield len("".join(_texts(record)).encode())
        except (ValueError, csv.Error):
            return  # what is wrong with it, the check says
        return
    with file.open("rb") as lines:
        yield from (len(line) for line in lines if line.strip())


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    for value in record.values():
        if value is not None:
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
