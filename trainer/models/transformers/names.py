"""The hub's names for the tensors of a class of transformers, by transformers' own rules."""

import re
from collections.abc import Iterable
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

# How transformers' rules make one parameter of the experts' tensors: one upon the other, and then
# the rows of several kinds one below the other.
STACKED, JOINED = ("MergeModulelist", 0), ("Concatenate", 1)


class HubNames:
    """From the names of a causal model's parameters to those of its folder, and to PEFT's.

    Args:
        model_type: of the class; its rules of conversion are transformers'.
        base: the name of the base model in the class.
        place: the base model's name in a larger model, of which this is the text part; or None.
    """

    def __init__(self, model_type: str, base: str, place: str | None) -> None:
        self._base, self._place = f"{base}.", place
        # The beginning of the hub's names for the base model's tensors.
        self._prefix, self.head = self._base, "lm_head.weight"
        self._rules = list(get_checkpoint_conversion_mapping(model_type) or ())

    def find(self, names: Iterable[str], embedding: str) -> tuple[str, ...] | int:
        """Find the text part's tensors among those of a larger model's files.

        Larger models have had more than one order of names; a text model has one.

        Args:
            embedding: the parameter's name.

        Returns:
            The names that belong to the other parts, or how many text parts were found if not one.
        """
        names = list(names)
        end = embedding.removeprefix(self._base)
        prefixes = [name.removesuffix(end) for name in names if name.endswith(f".{end}")]
        if len(prefixes) != 1:
            return len(prefixes)
        (self._prefix,) = prefixes
        self.head = next((name for name in names if name.endswith(self.head)), self.head)
        return tuple(name for name in names if not name.startswith((self._prefix, self.head)))

    def of(self, parameter: str) -> str:
        """The hub's tensor that holds a parameter, or a buffer."""
        if parameter.startswith("final_norm."):
            return f"{self._prefix}norm.{parameter.removeprefix('final_norm.')}"
        if parameter == "score.weight":
            return parameter
        if parameter == "lm_head.weight":
            return self.head
        return self._renamed(self._prefix + parameter.removeprefix(self._base))

    def pieces(self, parameter: str, shape: tuple[int, ...]) -> dict[str, tuple[Any, ...]]:
        """The hub's tensors of the experts that a parameter stacks.

        Each expert is a slice [outputs, inputs] of it, whose rows several tensors may share.
        """
        for rule in self._rules:
            if not isinstance(rule, WeightConverter):
                continue
            (target,), sources = rule.target_patterns, rule.source_patterns
            if not parameter.endswith(target):
                continue
            steps = [(type(step).__name__, getattr(step, "dim", None)) for step in rule.operations]
            if steps not in ([STACKED], [STACKED, JOINED]) or len(shape) != 3:
                return {}
            rows = shape[1] // len(sources)
            start = self._prefix + parameter.removeprefix(self._base)
            return {
                self._renamed(start.removesuffix(target) + source.replace("*", str(expert))): (
                    expert,
                    slice(part * rows, (part + 1) * rows),
                )
                for part, source in enumerate(sources)
                for expert in range(shape[0])
            }
        return {}

    def of_peft(self, tensor: str) -> str:
        """The name that transformers' class has for a tensor of the hub."""
        if self._place is None or not tensor.startswith(self._prefix):
            return tensor
        return f"{self._place}.{tensor.removeprefix(self._prefix)}"

    def of_module(self, module: str) -> str:
        """The name of a module, such as a layer's experts, in the class that PEFT wraps."""
        if self._place is None:
            return module
        return f"{self._place}.{module.removeprefix(self._base)}"

    def _renamed(self, name: str) -> str:
        """A name of the class's as the hub has it, where the two differ by a word."""
        for rule in self._rules:
            if type(rule) is WeightRenaming:
                # The hub's word is written as a regular expression.
                word = re.sub(r"\\(.)", r"\1", rule.source_patterns[0])
                name = name.replace(rule.target_patterns[0], word)
        return name
