"""Distillation: the student learns the teacher's distribution of each trained token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from runspec import tokens
from runspec.keys.distill import DistillConfig
from runspec.keys.train import TrainConfig
from runspec.storage import patiently
from trainer.errors import ConfigError
from trainer.layers.batch import MicroBatch
from trainer.layers.divergence import Divergence, Sums, distillation_loss, frozen_factors
from trainer.layers.head import Factors, through_head
from trainer.methods.base import LossSum, Models, Objective
from trainer.models import build
from trainer.models.builder import Builder


class Distillation(Objective):
    """A frozen teacher runs forward over the student's batches, laid out like the student.

    Figures, means over the trained tokens: kd_loss, the divergence times temperature^2;
    cross_entropy, of the student with the data; top1_agreement, the share of tokens for which both
    models think the same one likeliest.
    """

    config_class: ClassVar[type[TrainConfig]] = DistillConfig

    @classmethod
    def faults(cls, config: Any) -> list[str]:
        """What is outside of its range, and whether the teacher has other tokens."""
        texts = super().faults(config)
        texts += [
            f"{name}: must be from 0 to 1, got {value}"
            for name in ("beta", "cross_entropy_share")
            if (value := getattr(config, name)) > 1
        ]
        return texts + tokenizer_faults(config.model_folder, Path(config.teacher), _added(config))

    def build_models(self, builder: Builder) -> Models:
        """As Objective.build_models; also raises ConfigError for a teacher with other tokens."""
        if faults := self.world.from_main(lambda: self.faults(self.config)):
            raise ConfigError(*faults)
        return super().build_models(builder)

    def loss(self, models: Models, batch: MicroBatch) -> LossSum:
        config, batch = self.config, batch.to(self.world.device)
        how = Divergence(config.beta, config.temperature, config.cross_entropy_share)
        with models.as_teacher() as teacher:
            wanted = frozen_factors(teacher, batch)

        def of_logits(own: Factors) -> Sums:
            return distillation_loss(own, wanted, batch.targets, how)

        sums = through_head(models.policy.module, batch, of_logits)
        return LossSum(
            sums.total,
            {
                "kd_loss": sums.divergence,
                "cross_entropy": sums.cross_entropy,
                "top1_agreement": sums.agreement,
            },
        )


def tokenizer_faults(
    student: Path, teacher: Path, added: Mapping[int, str] | None = None
) -> list[str]:
    """Why two model folders do not have the same tokens, at most one line; [] if either is absent.

    The teacher may have more of them. It must have all of the student's: it has learnt nothing for
    an id that no token of its own has.

    Args:
        added: tokens that the student gets beside its folder's.
    """
    if not (student.is_dir() and teacher.is_dir()):
        return []
    files = [folder / "tokenizer.json" for folder in (student, teacher)]
    advice = "give a teacher with the student's tokenizer"
    if missing := [str(file) for file in files if not file.is_file()]:
        return [f"teacher: {missing[0]} is missing, so its tokens cannot be compared; {advice}"]
    contents = [patiently(Path.read_bytes, file) for file in files]
    if not added and contents[0] == contents[1]:
        return []
    try:
        own, other = map(_tokens, contents)
    except Exception as error:  # the library has no class of its own
        return [f"teacher: {files[0]} or {files[1]} is no tokenizer: {error}; {advice}"]
    own |= added or {}
    differ = [number for number in sorted(own) if other.get(number) != own[number]]
    if not differ:
        return []
    number = differ[0]
    if number in (added or {}):
        advice = "train the teacher with the same new_tokens first, or leave them out"
    there = repr(other[number]) if number in other else "missing"
    return [
        f"teacher: {teacher} has another tokenizer: token {number} is {there} there and "
        f"{own[number]!r} in {student}, and {len(differ):,} of {len(own):,} differ; {advice}"
    ]


def _added(config: Any) -> dict[int, str]:
    """The tokens that a config adds to the student's, by number."""
    if not (config.tokenizer.get("new_tokens") and config.model_folder.is_dir()):
        return {}
    try:
        ids = build.new_ids(config.tokenizer)
    except ConfigError:
        return {}  # other checks say what is wrong with them
    return dict(zip(ids, tokens.new_tokens(config.tokenizer), strict=True))


def _tokens(content: bytes) -> dict[int, str]:
    """The text of each token by its number, from the content of tokenizer.json."""
    from tokenizers import Tokenizer  # hardly any teacher has another file than its student

    known = Tokenizer.from_buffer(content).get_vocab(with_added_tokens=True)
    return {number: token for token, number in known.items()}
