"""A teacher's one pass over the data of a distillation, whose results are kept beside the tokens.

The samples are done in parts, a part by one data-parallel rank at a time. Which rows lie together
in a batch depends on the part alone, so that a pass that was killed, or that other ranks go on
with, gives the same files.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from runspec import files, publish
from runspec.keys.distill import DistillConfig, TeachConfig
from runspec.keys.train import TrainConfig
from runspec.progress import Heartbeat
from trainer.config import instantiate
from trainer.data import teacher as disk
from trainer.data.batches import Rows, packed_rows
from trainer.data.teacher import KeptTeacher, Part
from trainer.data.tokenised import SHARED_FOLDER_LIMIT_S, TokenisedDataset
from trainer.errors import ConfigError, cache_written
from trainer.layers.batch import MicroBatch, TopK
from trainer.layers.head import Factors, through_head
from trainer.layers.top_k import sampled_errors, top_k
from trainer.methods.base import Models
from trainer.methods.distill import Distillation
from trainer.methods.kept_teacher import Kept, kept, sets
from trainer.models.builder import Builder
from trainer.parallel import fitness
from trainer.parallel import world as distributed
from trainer.parallel.device import described
from trainer.parallel.world import StopRequest, World
from trainer.progress import Progress

SAID_EVERY_S = 15.0
# Tokens of the first batch of each part that are compared over the whole vocabulary.
COMPARED = 128


class Teaching(Distillation):
    """What of a distillation's config the teacher's pass needs."""

    config_class: ClassVar[type[TrainConfig]] = TeachConfig

    @classmethod
    def instead(cls, config: Any, attempt: int) -> bool:
        """Do the parts that are not there yet; a stop keeps those that are written."""
        config = replace(config, teacher_log_probs="online")
        world = distributed.start(config.device, vars(config))
        stop = StopRequest(world, config.output_dir)
        if line := fitness.check(world):
            world.say(line)

        def check() -> Kept:
            if faults := cls.faults(config):
                raise ConfigError(*faults)
            return kept(config)

        kept_set = world.from_main(check)
        method = cls(config, world)
        data = method.build_data()
        passes = [
            TeacherPass(key, block, samples, config, world, kept_set)
            for key, (block, samples) in sets(config, data).items()
        ]
        progress = Progress(
            sum(len(each.parts) for each in passes), attempt, described(world.device)
        )
        logs = config.output_dir / files.LOGS / str(attempt)
        heartbeat = Heartbeat(logs if world.is_main else None)

        def tell(state: str, step: int) -> None:
            progress.state, progress.step = state, step
            if world.is_main:
                progress.write(config.output_dir)

        module, said, steps, before = None, 0.0, 0, 0
        if any(each.left for each in passes):
            module = method.build_models(Builder(config, world, data)).policy.module.eval()
        tell("running", progress.total_steps - sum(len(each.left) for each in passes))
        with torch.no_grad():
            for each in passes:
                for done in each.run(module):
                    steps += 1
                    heartbeat.step(steps)
                    if time.monotonic() - said > SAID_EVERY_S:
                        said = time.monotonic()
                        world.say(f"teacher: {done.parts:,} of {done.of:,} parts")
                        tell("running", before + done.parts)
                    if world.sum([stop.seen_here()])[0]:
                        world.say("asked to stop: the parts that are written are kept")
                        tell("stopped", before + done.parts)
                        stop.clear()
                        return True
                before += len(each.parts)
                for line in world.from_main(each.described):
                    world.say(line)
        heartbeat.enter("finished")
        tell("finished", progress.total_steps)
        return True

    @classmethod
    def faults(cls, config: Any) -> list[str]:
        """As of a distillation in which the teacher runs."""
        return super().faults(replace(config, teacher_log_probs="online"))

    def build_models(self, builder: Builder) -> Models:
        """The teacher alone, in the place of a policy."""
        self.world.on_main(lambda: self.refuse(self.setting_faults(self.config)))
        return Models(builder.teacher(self.config.teacher))

    def run_once(self, models: Models, batch: MicroBatch) -> None:
        """The pass over one batch, without storing it, for `plugins.estimate.trace`."""
        config, module = self.config, models.policy.module
        kept_of(module, batch, config.teacher_top_k, module.vocab_size, config.temperature, True)


@torch.no_grad()
def kept_of(
    module: nn.Module, batch: MicroBatch, k: int, vocabulary: int, heat: float, compared: bool
) -> tuple[TopK, torch.Tensor]:
    """Top k and tail of a batch's trained tokens, and `sampled_errors`, or zeros.

    Args:
        batch: on the module's device.
        vocabulary, heat: as in `top_k`.
        compared: whether the errors are wanted.
    """

    def of_logits(made_of: Factors) -> tuple[TopK, torch.Tensor]:
        kept = top_k(made_of, k, vocabulary, heat)
        if not (compared and batch.target_count):
            return kept, torch.zeros(4)
        return kept, sampled_errors(made_of, kept, vocabulary, heat, COMPARED)

    return through_head(module, batch, of_logits)


class SampleRange:
    """Some samples of a dataset in turn, as trainer.data.batches.Samples."""

    def __init__(self, samples: TokenisedDataset, begin: int, end: int) -> None:
        self._samples, self._begin, here = samples, begin, slice(begin, end)
        self.lengths, self.documents = samples.lengths[here], samples.documents[here]
        self.numbers, self.targets = samples.numbers[here], samples.targets[here]
        self.reference: np.ndarray | None = None
        self.teacher: KeptTeacher | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._samples[self._begin + index]


class Done(NamedTuple):
    """How far a pass over a dataset is."""

    # Parts that are written, and all of them.
    parts: int
    of: int


class TeacherPass:
    """The pass over one dataset; all ranks make it together.

    Args:
        key: of the dataset, for messages.
        block: the dataset's.
    """

    def __init__(
        self,
        key: str,
        block: dict[str, Any],
        samples: TokenisedDataset,
        config: DistillConfig,
        world: World,
        kept: Kept,
    ) -> None:
        self._key, self._block, self._samples = key, block, samples
        self._config, self._world, self._kept = config, world, kept
        self._folder: Path = samples.folder / kept.name
        self._k = min(config.teacher_top_k, kept.vocabulary)
        self.parts = disk.parts_of(samples.lengths, samples.targets)
        self._tokenizer = instantiate("tokenizer", config.tokenizer)
        world.on_main(self._begin)
        self.left: list[Part] = world.gather(self._missing() if world.is_main else None)[0]

    def run(self, module: nn.Module | None) -> Iterator[Done]:
        """Do what is left; after each batch of all ranks it says how far it is.

        Args:
            module: the teacher; None if nothing is left.
        """
        world, size = self._world, self._world.data_size
        done, count = len(self.parts) - len(self.left), len(self.parts)
        for first in range(0, len(self.left), size):
            now = self.left[first : first + size]
            mine = now[world.data_rank] if world.data_rank < len(now) else None
            part = mine or now[0]
            view = SampleRange(self._samples, part.begin, part.end)
            rows = packed_rows(self._config, self._block, view, self._tokenizer, None)
            number = -(-len(rows) // self._config.batch_size) if mine else 0
            records = np.zeros(part.tokens, disk.record(self._k))
            begins, figures = np.cumsum(view.targets) - view.targets, [0.0] * 4
            # A rank with fewer batches runs masked ones: FSDP gathers on all ranks together.
            for index in range(max(world.gather(number))):
                batch = self._batch(rows, index if index < number else None)
                kept, errors = self._of(module, batch.to(world.device), compared=index == 0)
                if index == 0:
                    figures = errors.tolist()
                self._put(records, batch, kept, begins, view.targets)
                yield Done(done, count)
            own = mine if world.data_weight else None
            world.on_all(partial(self._write, own, records, view.targets, figures))
            done += len(now)
            yield Done(done, count)
        world.on_main(self._publish)

    def _write(
        self, part: Part | None, records: np.ndarray, targets: np.ndarray, figures: list[float]
    ) -> None:
        if part is not None:
            disk.write_part(self._folder, part, records, targets, figures)

    def _batch(self, rows: Rows[SampleRange], number: int | None) -> MicroBatch:
        """A batch by its number in a part; a masked one without."""
        size = self._config.batch_size
        begin = 0 if number is None else number * size
        own = list(range(begin, min(begin + size, len(rows)))) if number is not None else []
        return rows.collate([rows[index] for index in own + [~begin] * (size - len(own))])

    def _of(
        self, module: nn.Module | None, batch: MicroBatch, compared: bool
    ) -> tuple[TopK, torch.Tensor]:
        if module is None:
            raise RuntimeError("a pass with parts left needs the teacher")
        vocabulary, heat = self._kept.vocabulary, self._config.temperature
        return kept_of(module, batch, self._k, vocabulary, heat, compared)

    @staticmethod
    def _put(
        records: np.ndarray,
        batch: MicroBatch,
        kept: TopK,
        begins: np.ndarray,
        targets: np.ndarray,
    ) -> None:
        own = batch.samples.numpy()
        counts = targets[own]
        # Of each trained token of the batch the place in the part.
        places = np.arange(counts.sum()) + np.repeat(
            begins[own] - np.cumsum(counts) + counts, counts
        )
        for name, values in kept._asdict().items():
            records[name][places] = values.float().cpu() if name != "ids" else values.cpu()

    def _missing(self) -> list[Part]:
        return disk.missing_parts(self._folder, self.parts, disk.record(self._k))

    def _begin(self) -> None:
        """Make the folder, and remove what starts left behind that were killed."""
        with cache_written(self._folder.parent):
            self._folder.mkdir(exist_ok=True)
        publish.remove_left(self._folder)

    def _publish(self) -> None:
        """Write META once all parts are seen here."""
        deadline = time.monotonic() + SHARED_FOLDER_LIMIT_S
        while missing := self._missing():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"data_cache_dir: part {missing[0].number} in {self._folder} was made on "
                    "another node and is not seen here; set data_cache_dir to a shared folder"
                )
            time.sleep(0.2)
        figures = [
            files.read_json(self._folder / disk.FIGURES.format(part.number)) for part in self.parts
        ]
        meta = {
            "parts": len(self.parts),
            "k": self._k,
            "vocabulary": self._kept.vocabulary,
            "teacher": self._config.teacher,
            "teacher_weights": self._kept.weights,
            "dtype": self._config.dtype,
            "temperature": self._config.temperature,
            "compared": np.sum(figures, 0).tolist(),
        }
        files.write_json(self._folder / disk.META, meta)

    def described(self) -> list[str]:
        """What is kept, its size, and its error, in words; when it is complete."""
        meta = files.read_json(self._folder / disk.META)
        size = disk.record(self._k).itemsize
        tokens = sum(part.tokens for part in self.parts)
        on_disk = sum(
            (self._folder / disk.PART.format(part.number)).stat().st_size for part in self.parts
        )
        count, tail, whole, over = meta["compared"]
        lines = [
            f"teacher    {self._key}: {tokens:,} trained tokens, top {self._k} and tail, {size} "
            f"bytes per token, {on_disk / 1e6:,.1f} MB in {self._folder}"
        ]
        if count:
            lines.append(
                f"error      {count:,.0f} tokens compared: {tail / count:.4f} of the mass is in "
                f"the tail; the forward KL to the teacher with normal noise in its logits is "
                f"{over / count:.5f}, over the whole vocabulary {whole / count:.5f} "
                f"({100 * (1 - over / max(whole, 1e-30)):.2f} % less)"
            )
        return lines
