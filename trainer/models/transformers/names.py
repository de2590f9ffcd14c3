"""A model folder's names for the tensors of a class of transformers, by transformers' rules."""

import re
from collections.abc import Iterable
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

# How transformers' rules make one parameter of the experts' tensors: one upon the other, and then
# the rows of several kinds one below the other.
STACKED, JOINED = ("MergeModulelist", 0), ("Concatenate", 1)


class FileNames:
    """From the names of a class's tensors to those in the files of its folder.

    Args:
        model_type: of the text model; its rules of conversion are transformers'.
        base, head: the names of the text model and of the output layer in the class.
    """

    def __init__(self, model_type: str, base: str, head: str) -> None:
        self._base, self._head = f"{base}.", f"{head}.weight"
        # The beginning of the files' names for the text model's tensors, and the output layer's.
        self._prefix, self.head = self._base, self._head
        self._rules = list(get_checkpoint_conversion_mapping(model_type) or ())

    def find(self, names: Iterable[str], embedding: str) -> tuple[str, ...] | int:
        """Find the text part's tensors among those of a larger model's files.

        Larger models have had more than one order of names; a text model has one.

        Args:
            embedding: the name of its weight.

        Returns:
            The names that belong to the other parts, or how many text parts were found if not one.
        """
        names = list(names)
        end = embedding.removeprefix(self._base)
        prefixes = [name.removesuffix(end) for name in names if name.endswith(f".{end}")]
        if len(prefixes) != 1:
            return len(prefixes)
        (self._prefix,) = prefixes
        head = ".".join(self._head.split(".")[-2:])
        self.head = next((name for name in names if name.endswith(head)), self.head)
        return tuple(name for name in names if not name.startswith((self._prefix, self.head)))

    def of(self, tensor: str) -> str:
        """The file's name of a tensor that has this name in the class."""
        if tensor == self._head:
            return self.head
        if not tensor.startswith(self._base):
            return tensor
        return self._renamed(self._prefix + tensor.removeprefix(self._base))

    def pieces(self, parameter: str, shape: tuple[int, ...]) -> dict[str, tuple[Any, ...]]:
        """The files' tensors of the experts that a parameter stacks.

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

    def _renamed(self, name: str) -> str:
        """A name of the class's as files have it, where the two differ by a word."""
        for rule in self._rules:
            if type(rule) is WeightRenaming:
                # The files' word is written as a regular expression.
                word = re.sub(r"\\(.)", r"\1", rule.source_patterns[0])
                name = name.replace(rule.target_patterns[0], word)
        return name
