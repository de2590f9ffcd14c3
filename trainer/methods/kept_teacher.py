"""Where a teacher's log-probabilities are kept, and what a distillation reads of them."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from runspec.keys.distill import DistillConfig
from trainer.checkpoint.weights import SafetensorsSource
from trainer.data.batches import Batches, Data
from trainer.data.form import SampleForm
from trainer.data.origin import data_files
from trainer.data.teacher import FORMAT, META, KeptTeacher
from trainer.data.tokenised import TokenisedDataset, expected_folder
from trainer.errors import ConfigError
from trainer.models import build
from trainer.models.builder import teacher_config
from trainer.parallel.world import World

# Larger data are not hashed before the queue.
HASHED_BYTES = 2**30


class Kept(NamedTuple):
    """What is kept of a teacher."""

    # Of the folder beside the tokens.
    name: str
    # How many tokens count, from the first on.
    vocabulary: int
    # A hash of the teacher's.
    weights: str


def kept(config: DistillConfig) -> Kept:
    """What is kept for a config; its name is a hash of all that decides on the numbers."""
    teacher = teacher_config(config, config.teacher)
    models = build.empty(config), build.empty(teacher, frozen=True)
    vocabulary = min(model.vocab_size for model in models)
    weights = SafetensorsSource.open(teacher.checkpointer).fingerprint()
    numbers = (config.teacher_top_k, config.temperature, vocabulary)
    precision = [config.dtype, teacher.fp8_recipe, *(["nf4"] * config.quantizes_teacher)]
    content = json.dumps([FORMAT, weights, *precision, *numbers])
    return Kept(f"teacher_{hashlib.sha256(content.encode()).hexdigest()[:16]}", vocabulary, weights)


def sets(config: DistillConfig, data: Data) -> dict[str, tuple[dict[str, Any], TokenisedDataset]]:
    """The blocks and samples of the data by their keys."""
    blocks = {
        "dataset": (config.dataset, data.training),
        "dataset_val": (config.dataset_val or {}, data.validation),
    }
    return {
        key: (block, batches.rows.samples)
        for key, (block, batches) in blocks.items()
        if isinstance(batches, Batches)
    }


def give(config: DistillConfig, world: World, data: Data) -> Kept:
    """Let the batches of `data` have what is kept; all ranks call this together.

    Raises:
        ConfigError: it is missing or damaged.
    """
    kept_set = world.from_main(lambda: kept(config))

    def read() -> None:
        faults = []
        for key, (_, samples) in sets(config, data).items():
            folder = samples.folder / kept_set.name
            if (folder / META).is_file():
                samples.teacher = KeptTeacher(folder, samples.lengths, samples.targets)
            else:
                faults.append(_absent(key, config, folder))
        if faults:
            raise ConfigError(*faults)

    world.on_all(read)
    return kept_set


def missing(config: DistillConfig, form: SampleForm) -> list[str]:
    """What is not kept yet, as far as files show it: one line per dataset."""
    blocks = {"dataset": config.dataset, "dataset_val": config.dataset_val}
    here = config.model_folder.is_dir() and Path(config.teacher).is_dir()
    if not (here and config.data_cache.parent.is_dir()):
        return []
    texts = []
    try:
        for key, block in blocks.items():
            if not block or sum(p.stat().st_size for p in data_files(block)) > HASHED_BYTES:
                continue
            tokens = expected_folder(block, config, form)
            folder = tokens / kept(config).name if tokens else None
            if folder is not None and not (folder / META).is_file():
                texts.append(_absent(key, config, folder))
    except (ConfigError, OSError):
        return []  # other checks say what is wrong with model, teacher or data
    return texts


def _absent(key: str, config: DistillConfig, folder: Path) -> str:
    return (
        f"teacher_log_probs: {key}: there is no {folder}, the stored pass of {config.teacher} with "
        f"dtype {config.dtype}{' over NF4' * config.quantizes_teacher}, teacher_top_k "
        f"{config.teacher_top_k} and temperature {config.temperature}: make it by the same recipe "
        "with cookbook submit --recipe RECIPE entry=teach"
    )
