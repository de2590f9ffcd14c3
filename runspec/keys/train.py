"""The config that every training method of the kit has: shared keys, and what the launcher asks.

A method's own class is in a file beside this one. docs/keys.md is made of these classes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runspec import adapters, files
from runspec.keys.fields import (
    CheckpointKeys,
    DataKeys,
    LayoutKeys,
    LoggingKeys,
    PrecisionKeys,
    TrainingKeys,
)
from runspec.keys.key import Fault, Key, keys_of
from runspec.keys.model import ModelKeys
from runspec.layout import FP8_MULTIPLE

# Builders of torchtune's whose train_on_input is true if a config leaves it out; here it is false.
TRAINS_PROMPTS = (
    "torchtune.datasets.alpaca_dataset",
    "torchtune.datasets.alpaca_cleaned_dataset",
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelKeys, PrecisionKeys, LayoutKeys):
    """What building a model and laying it out over the ranks needs of a config.

    activation_checkpointing is as `recomputed` returns it.

    Attributes:
        has_score_head: the model gives one number for each document instead of logits.
    """

    has_score_head: ClassVar[bool] = False
    # Nothing of it is trained.
    frozen: bool = False

    @property
    def quantizes_teacher(self) -> bool:
        """Whether the teacher is held in NF4."""
        return False

    @property
    def model_folder(self) -> Path:
        """The Hugging Face folder that the weights come from."""
        return Path(self.checkpointer["checkpoint_dir"])

    @property
    def reads_weights(self) -> bool:
        """Whether training begins with the weights of the model's folder."""
        return True

    @property
    def packs(self) -> bool:
        """Whether rows hold several documents."""
        return False

    @property
    def fp8_recipe(self) -> str | None:
        """How the products of the blocks are scaled in fp8; None without it."""
        return self.fp8_recipe_name if self.enable_fp8_training else None

    @property
    def row_multiple(self) -> int:
        """What the length of every row must be divisible by, for tensor parallelism and fp8."""
        return math.lcm(self.tensor_parallel_dim, FP8_MULTIPLE if self.enable_fp8_training else 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelSpec, DataKeys, TrainingKeys, CheckpointKeys, LoggingKeys):
    """A checked train.yaml: a field for each key that is used (see docs/keys.md).

    A method's class adds fields, by `setting`, and says in class attributes what the launcher must
    know of the method without importing it.

    dataset_val holds what it takes from dataset. notes: about keys that are not used.

    Attributes:
        objective: dotted path of the trainer's class of the method.
        documents_per_sample: documents that lie together in a batch, such as the two of a pair.
        has_reference: the method compares with the policy before training; see `reference_of`.
        pairs: the component that reads preferences from a file of the user's own; "" for a method
            that does not train on them.
        samples_answers: the policy answers prompts before each update, group_size times each.
        streams: the data may be a stream, which has no number of samples.
        teacher_key: the key that names the folder of a frozen model that is only run forward.
        reads_teacher_logits: the loss compares all logits of both, by trainer.layers.divergence.
        goal: what it does, in the title of a recipe that `cookbook start` writes.
        torchtune: part of the names of torchtune's scripts of the same purpose.
        companion: what the supervisor calls beside the ranks, MODULE:CLASS; "" for nothing.
        sampler: the module that each GPU of rollout nodes runs, if the method samples answers.
    """

    objective: ClassVar[str] = ""
    documents_per_sample: ClassVar[int] = 1
    has_reference: ClassVar[bool] = False
    pairs: ClassVar[str] = ""
    teacher_key: ClassVar[str] = ""
    reads_teacher_logits: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    samples_answers: ClassVar[bool] = False
    goal: ClassVar[str] = ""
    torchtune: ClassVar[str] = ""
    companion: ClassVar[str] = ""
    sampler: ClassVar[str] = ""
    # Accepted because torchtune's configs hold them; they change nothing here, or are refused.
    ignored: ClassVar[tuple[Key, ...]] = (
        Key(
            "resume_from_checkpoint",
            "flag",
            "Continue a torchtune run.",
            False,
            refused=(
                "a run resumes automatically after a fault; resume an ended run with cookbook "
                "resume RUN; to start from an adapter set checkpointer.adapter_checkpoint"
            ),
        ),
        Key(
            "collate_fn",
            "torchtune.data.padded_collate_sft | torchtune.data.padded_collate_packed",
            "How samples become a batch.",
            unused="the trainer makes the batches, with the same result",
        ),
        Key(
            "optimizer_in_bwd",
            "flag",
            "Step the optimizer during the backward pass.",
            False,
            unused="the optimizer steps after the backward pass",
        ),
        Key(
            "low_cpu_ram",
            "flag",
            "Load the model with less CPU memory.",
            False,
            unused="weights are always read tensor by tensor",
        ),
        Key(
            "tensor_parallel_plan",
            "open block",
            "How tensor parallelism splits layers.",
            unused="the trainer uses its own plan",
        ),
        Key(
            "custom_sharded_layers",
            "texts",
            "Layers to shard separately.",
            unused="each block, embedding and output head are sharded separately",
        ),
        Key(
            "memory_efficient_fsdp_wrap",
            "flag",
            "Shard embedding and output separately.",
            False,
            unused="each block, embedding and output head are sharded separately",
        ),
        Key(
            "metric_logger",
            "open block",
            "torchtune's logger.",
            unused="metrics go to metrics.jsonl and TensorBoard",
        ),
        Key(
            "log_peak_memory_stats",
            "flag",
            "Log peak memory.",
            False,
            unused="peak memory is always logged",
        ),
        Key("log_level", "text", "Level of torchtune's logger.", unused="logs are at INFO"),
    )

    output_dir: Path
    notes: tuple[str, ...] = ()

    @classmethod
    def keys(cls) -> dict[str, Key]:
        """The keys of the method."""
        return keys_of(cls)

    @classmethod
    def own_keys(cls) -> dict[str, Key]:
        """The keys that the method adds to those that all methods share."""
        shared = keys_of(TrainConfig)
        return {name: key for name, key in keys_of(cls).items() if name not in shared}

    @classmethod
    def reference_of(cls, config: Mapping[str, Any]) -> str:
        """What stands for the policy before training, by a recipe's content.

        adapter_off: the policy with its adapter off; model: a frozen second model; "": nothing
        does.
        """
        if not cls.has_reference:
            return ""
        start = (config.get("checkpointer") or {}).get("adapter_checkpoint")
        model = config.get("model") or {}
        # The embedding and the output head have no adapter that could be turned off.
        is_new = adapters.name_of(model) and not (start or model.get("modules_to_save"))
        return "adapter_off" if is_new else "model"

    @classmethod
    def teacher_of(cls, config: Mapping[str, Any]) -> str:
        """The folder of the model that runs beside the policy, by a recipe's content; or ""."""
        return str(config.get(cls.teacher_key) or "") if cls.teacher_key else ""

    @classmethod
    def recipe_faults(cls, config: Mapping[str, Any]) -> Iterator[Fault]:
        """What is wrong between keys of a resolved recipe, before anything of it is started."""
        yield from ()

    @classmethod
    def functions(cls, config: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
        """The values, by the path of their keys, that name code: FILE.py:NAME or another form.

        A file of the user's own is found from the recipe's folder and copied into the run.
        """
        return {}

    @classmethod
    def key_notes(cls, config: Mapping[str, Any]) -> Iterator[str]:
        """One line for each key that does something else than one may expect of it."""
        for name in ("dataset", "dataset_val"):
            block = config.get(name)
            if not isinstance(block, dict):
                continue
            if block.get("train_on_input") is True:
                yield (
                    f"{name}.train_on_input: true, so the prompts are also trained; set "
                    f"{name}.train_on_input=False to train the answers only"
                )
            elif with_train_on_input(block, False) is not block:
                yield (
                    f"{name}.train_on_input: not set, so only the answers are trained; torchtune's "
                    f"{block['_component_'].rpartition('.')[2]} would also train the prompts: "
                    f"{name}.train_on_input=True"
                )
        if config.get("enable_fp8_training") and not config.get("compile"):
            yield (
                "enable_fp8_training: without compile its casts cost more time than its matrix "
                "products save; set compile=True"
            )
        if uncompiled_experts(config):
            yield (
                "compile: blocks with experts are not compiled with expert_parallel_dim above 1 "
                "and activation_checkpointing=op; with full, a number or none they are"
            )

    @classmethod
    def backend_of(cls, config: Mapping[str, Any]) -> str:
        """The package of what generates beside the ranks, in the recipe's environment; or ""."""
        return ""

    @property
    def reference_kind(self) -> str:
        """As `reference_of` this config."""
        return self.reference_of(vars(self))

    @property
    def packs(self) -> bool:
        """Whether rows hold several documents."""
        return bool(self.dataset.get("packed"))

    @property
    def data_cache(self) -> Path:
        """The folder of tokenised datasets; beside the run directories if none is given."""
        if self.data_cache_dir is None:
            return self.output_dir.parent / files.DATA_CACHE
        return Path(self.data_cache_dir).expanduser().absolute()


def with_train_on_input(block: Any, value: bool) -> Any:
    """Return a dataset block with train_on_input set, if torchtune has another default for it."""
    open_choice = isinstance(block, dict) and block.get("train_on_input") is None
    if open_choice and block.get("_component_") in TRAINS_PROMPTS:
        return {**block, "train_on_input": value}
    return block


def recomputed(config: Mapping[str, Any]) -> int | str | None:
    """Return what the backward pass recomputes, by a recipe's content.

    n: every n-th layer (1: all). "op": all but matrix products and softmax attention. None:
    nothing.
    """
    mode: int | str | None = config.get("activation_checkpointing")
    return {"none": None, "full": 1}.get(str(mode), mode)


def uncompiled_experts(config: Mapping[str, Any]) -> bool:
    """Whether blocks with experts stay uncompiled, although `compile` is set.

    The exchange of tokens between ranks ends a compiled graph, and "op" needs a whole one.
    """
    ranks = config.get("expert_parallel_dim")
    spread = isinstance(ranks, int) and ranks > 1
    return config.get("compile") is True and spread and recomputed(config) == "op"
