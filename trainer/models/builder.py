"""The models of a method: the policy, and frozen ones beside it that are laid out like it."""

from dataclasses import replace
from typing import Any

from runspec import files
from runspec.keys.model import TRANSFORMERS
from runspec.keys.train import ModelSpec
from trainer.checkpoint.weights import SafetensorsSource
from trainer.data.batches import Data
from trainer.errors import ConfigError
from trainer.layers.adapters.base import turn_off
from trainer.models import build
from trainer.models.build import Model
from trainer.parallel.world import World


def teacher_spec(spec: ModelSpec, folder: str) -> ModelSpec:
    """A frozen model of another folder, of the class that its config.json names.

    In NF4 it computes no products in fp8.
    """
    quantised = spec.quantizes_teacher
    return replace(
        spec,
        frozen=True,
        model={"_component_": TRANSFORMERS, "quantize_base": quantised},
        enable_fp8_training=spec.enable_fp8_training and not quantised,
        # It has the tokens that its folder has.
        tokenizer={**spec.tokenizer, "new_tokens": None},
        checkpointer={"checkpoint_dir": folder},
        router_aux_loss_coef=0.0,
        freeze=None,
    )


def frozen_fault(name: str, fault: str) -> str:
    """What is wrong with a frozen model of this name, whose keys may be of its own."""
    if name == "teacher":
        fault = fault.replace("model.quantize_base", "teacher_quantize_base")
    return f"{name}: {fault}"


class Builder:
    """Makes the models of a run; a subclass may have them on fake tensors.

    Args:
        data: whose samples the models must know the tokens of.

    fingerprints: of the weights of each frozen model that was made, by its name, and of the adapter
    that the reference has.
    """

    def __init__(self, spec: ModelSpec, world: World, data: Data) -> None:
        self.spec, self.world, self._data = spec, world, data
        self.fingerprints: dict[str, str] = {}

    def policy(self) -> Model:
        """The model that is trained.

        Raises:
            ConfigError: the model folder is missing, incomplete, or holds another model; or the
                model does not fit the data.
        """
        return self._built(self.spec)

    def reference(self) -> Model:
        """The policy as it is before training, as a model of its own.

        An adapter that training goes on from is a part of it; a new one is off.
        """
        model = self._frozen("reference", self.spec)
        if self.spec.checkpointer.get("adapter_checkpoint") is not None:
            self._load_adapter(model)
        else:
            turn_off(model.module)
        return model

    def teacher(self, folder: str) -> Model:
        """The model of another folder, of whatever class its config.json names; nothing is trained.

        Raises:
            ConfigError: as `policy`.
        """
        return self._frozen("teacher", teacher_spec(self.spec, folder))

    def _frozen(self, name: str, spec: ModelSpec) -> Model:
        # Without a backward pass nothing is kept for one, nothing updated, no layer needed twice.
        unused: dict[str, Any] = {
            "frozen": True,
            "master_weights": None,
            "activation_checkpointing": None,
            "enable_activation_offloading": False,
            "fsdp_reshard_after_forward": True,
        }
        try:
            model = self._built(replace(spec, **unused))
        except ConfigError as error:
            raise ConfigError(*(frozen_fault(name, fault) for fault in error.faults)) from None
        self.fingerprints[name] = self._fingerprint(spec)
        return model

    def _built(self, spec: ModelSpec) -> Model:
        return build.build(spec, self.world, self._data.faults)

    def _load_adapter(self, model: Model) -> None:
        from trainer.checkpoint import adapter  # seldom needed, and a rank is to start fast

        path = self.world.on_all(lambda: adapter.load(model, self.spec))
        sha256 = self.world.from_main(lambda: files.sha256(path))
        self.fingerprints["reference_adapter"] = sha256

    def _fingerprint(self, spec: ModelSpec) -> str:
        source = spec.checkpointer
        return self.world.from_main(lambda: SafetensorsSource.open(source).fingerprint())
