"""The shards of an evaluation: which samples, of which task, by which model; and their files.

A shard is a file under evals/shards that appears whole. It holds what a model did with its samples,
and the fingerprint of what that depends on: a shard of other settings counts as missing.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.evaluate import harness, pairs, samples
from plugins.evaluate.model import Answerer, fingerprint
from plugins.evaluate.recipe_keys import COMPARED_OF_TASK
from plugins.evaluate.samples import Sample
from plugins.evaluate.scores import normalised
from runspec import files
from runspec.files import patient_json
from runspec.storage import patiently
from runspec.weights import gives_scores
from trainer.errors import ConfigError

# What a task says of its answers, and not of how they are made.
_SHOWN = ("group", "metrics", "labels")
_DEPENDS = ("seed", "dtype", "batch_size", "max_new_tokens", "temperature", "top_p", "template")


@dataclass(frozen=True)
class Shard:
    """Some samples of a task, and the model that they are for."""

    # Among all shards.
    number: int
    task: str
    # candidate or against.
    side: str
    # Of the samples; last is not among them.
    first: int
    last: int

    @property
    def file(self) -> str:
        return f"{self.task}--{self.side}--{self.first:08d}.json"


class Plan:
    """All shards of an evaluation, in an order that every rank agrees on."""

    def __init__(self, config: dict[str, Any], run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self.folder_of_shards = run_dir / files.EVALS / files.SHARDS
        self.sides = [side for side in ("candidate", "against") if config.get(side)]
        for side in self.sides:
            if not self.folder(side).is_dir():
                raise ConfigError(f"{side}: there is no model folder {self.folder(side)}")
        self._check_kinds()
        self.models = {side: fingerprint(self.folder(side)) for side in self.sides}
        self.data: dict[str, list[Sample]] = {}
        # As the suite has it: labels of classification may be derived from the samples.
        self.task_settings: dict[str, dict[str, Any]] = {}
        for name, task in config["tasks"].items():
            self.data[name] = [] if task["kind"] == "lm_eval" else samples.read(name, task)
            self.task_settings[name] = {key: task.get(key) for key in COMPARED_OF_TASK}
            _complete(task, self.data[name])
        self.shards = list(self._shards())
        self.folder_of_shards.mkdir(parents=True, exist_ok=True)
        self._marks = {name: self._mark(name) for name in config["tasks"]}

    def _check_kinds(self) -> None:
        """A reward model answers nothing; raises ConfigError."""
        kinds = {name: task["kind"] for name, task in self.config["tasks"].items()}
        raised = [
            f"tasks.{name}: {self.folder(side)} is a reward model, which gives scores and no "
            "text; set kind: pair_accuracy"
            for side in self.sides
            if gives_scores(self.folder(side))
            for name, kind in kinds.items()
            if kind != "pair_accuracy"
        ]
        if raised:
            raise ConfigError(*raised)

    def _shards(self) -> Iterator[Shard]:
        size, number = int(self.config["shard_samples"]), 0
        for name in self.config["tasks"]:
            count = max(1, len(self.data[name]))
            for side in self.sides:
                for first in range(0, count, size):
                    yield Shard(number, name, side, first, min(first + size, count))
                    number += 1

    def _mark(self, name: str) -> dict[str, str]:
        """Return by side the hash of what a shard's content depends on."""
        task = self.config["tasks"][name]
        content = samples.content(self.data[name])
        settings = {key: self.config[key] for key in _DEPENDS}
        asked = {key: task[key] for key in task if key not in _SHOWN}
        common = json.dumps([settings, asked, content], sort_keys=True)
        return {side: _hash(common + self.models[side]) for side in self.sides}

    def folder(self, side: str) -> Path:
        return Path(str(self.config[side])).expanduser()

    @property
    def samples(self) -> int:
        """Samples to answer, counted once per model."""
        return sum(shard.last - shard.first for shard in self.shards)

    def rows(self, shard: Shard) -> list[dict[str, Any]] | None:
        """Return what a shard's file says, None if it has to be made."""
        try:
            content = patient_json(self.folder_of_shards / shard.file) or {}
        except files.DamagedFile:
            return None  # it is made again
        if content.get("mark") != self._marks[shard.task][shard.side]:
            return None
        return list(content["rows"])

    def missing(self) -> list[Shard]:
        # A file that is there was written for these settings, or is replaced by its rank.
        return [shard for shard in self.shards if self.rows(shard) is None]

    def done_samples(self) -> int:
        done = {path.name for path in self.folder_of_shards.glob("*.json")}
        return sum(shard.last - shard.first for shard in self.shards if shard.file in done)

    def all_rows(self, task: str, side: str) -> list[dict[str, Any]]:
        """Return what a model did with all samples of a task, in order."""
        own = [each for each in self.shards if (each.task, each.side) == (task, side)]
        return [row for shard in own for row in self.rows(shard) or []]

    def compute(self, shard: Shard, answerer: Answerer | pairs.Scorer) -> None:
        """Make a shard's file."""
        task = self.config["tasks"][shard.task]
        chosen = self.data[shard.task][shard.first : shard.last]
        rows: list[dict[str, Any]] = []
        if isinstance(answerer, pairs.Scorer) or task["kind"] == "pair_accuracy":
            rows = pairs.values(answerer, chosen)
        elif task["kind"] == "lm_eval":
            rows = [harness.evaluate(answerer, task, self.config)]
        elif task["kind"] == "perplexity":
            rows = answerer.likelihoods(chosen, task)
        else:
            size = int(self.config["batch_size"])
            for begin in range(0, len(chosen), size):
                rows += answerer.answers(chosen[begin : begin + size], task)
        content = {"mark": self._marks[shard.task][shard.side], "rows": rows}
        files.write_json(self.folder_of_shards / shard.file, content)


def _complete(task: dict[str, Any], rows: list[Sample]) -> None:
    """Add what a task's metrics need: the labels, and the schema's text."""
    if "classification" in task["metrics"] and not task.get("labels"):
        once = {normalised(each.reference): each.reference for each in rows}
        task["labels"] = [once[key] for key in sorted(once)]
    if task.get("schema"):
        given = task["schema"]
        if isinstance(given, str):
            try:
                given = files.parse_json(patiently(Path.read_bytes, Path(given).expanduser()))
            except (OSError, ValueError) as error:
                raise ConfigError(f"the JSON schema {given} cannot be read: {error}") from None
        task["schema_text"] = json.dumps(given)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
