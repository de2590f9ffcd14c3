"""Weights between Hugging Face safetensors and the ranks' shards, one tensor at a time."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from runspec.files import read_json
from runspec.storage import ABSENT, patiently
from runspec.weights import ADAPTER_CONFIG, NoWeights, weight_files
from trainer.errors import ConfigError
from trainer.layers import nf4
from trainer.model import SCORE, AdapterKind, Decoder, plain_name
from trainer.sharded import local_part

# The parameters, by plain name, whose rows a tensor of the hub holds; or one buffer.
Parts = list[tuple[str, torch.Tensor]]


class Piece(NamedTuple):
    """What a tensor of the hub is: parameter[place], and the parameter's plain name."""

    name: str
    parameter: nn.Parameter
    place: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's."""
        whole = torch.empty(nf4.dense_shape(self.parameter), device="meta")
        return tuple(whole[self.place].shape)


# Reads tensor[place]; all of it without a place.
Reader = Callable[..., torch.Tensor]
# The folder of another model differs in every layer, and a few lines show that.
SHOWN_TENSORS = 8
_OTHERS = "; give the folder whose weights belong to its config.json"
_HEAD = "lm_head.weight"
# Of an embedding and an output head, which take a second for each GiB, to see if they are the same.
_COMPARED_ROWS = 64
# As safetensors calls them.
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by their plain names."""
    for name, parameter in module.named_parameters():
        yield plain_name(name), parameter


def hub_tensors(module: Decoder) -> dict[str | None, Parts]:
    """By tensor of transformers' class, the base parameters (plain name, parameter) in its rows.

    Buffers that files have are among them. None has those that are in no tensor of the class.
    Parameters that files have in pieces are left out.
    """
    by_name: dict[str | None, Parts] = {}
    for name, parameter in named_parameters(module):
        if not module.is_adapter(name) and not module.hub_pieces(name):
            by_name.setdefault(module.hub_name(name), []).append((name, parameter))
    for name, buffer in module.held_buffers().items():
        by_name[module.hub_name(name)] = [(name, buffer)]
    return by_name


def file_tensors(module: Decoder) -> dict[str | None, Parts]:
    """The same by the names of the model folder's files."""
    tensors = hub_tensors(module).items()
    return {None if key is None else module.file_name(key): parts for key, parts in tensors}


def file_of(module: Decoder, parameter: str) -> str | None:
    """The files' tensor that holds a parameter; None if none does."""
    key = module.hub_name(parameter)
    return None if key is None else module.file_name(key)


def hub_pieces(module: Decoder) -> dict[str, Piece]:
    """By tensor of the files, the parameter that it is a piece of; a parameter's are neighbours."""
    return {
        key: Piece(name, parameter, index)
        for name, parameter in named_parameters(module)
        for key, index in module.hub_pieces(name).items()
    }


def hub_shape(parts: Parts) -> tuple[int, ...]:
    """The shape of a tensor of the hub, which holds the rows of all its parts, unquantised."""
    shapes = [nf4.dense_shape(parameter) for _, parameter in parts]
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def read_hf_config(file: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face model folder; raises ConfigError if it is missing."""
    try:
        content = patiently(read_json, file)
    except (*ABSENT, ValueError):
        content = None
    if not isinstance(content, dict):
        raise ConfigError(
            f"checkpointer.checkpoint_dir: {file} is missing or no JSON; "
            "give a Hugging Face model folder"
        )
    return content


@dataclass(frozen=True)
class SafetensorsSource:
    """Which file of a model folder has which tensor, and each tensor's shape.

    grown: the embedding and the output head, if they have rows for new tokens. Such a tensor is
    made of all that its file holds of it, whatever part is asked for.
    """

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    grown: frozenset[str] = frozenset()
    new_ids: range = range(0)

    @classmethod
    def open(cls, checkpointer: dict[str, Any]) -> "SafetensorsSource":
        """Read the headers of the files that a `checkpointer` block names.

        Args:
            checkpointer: checkpoint_dir, and optionally checkpoint_files (a list, or
                filename_format with max_filename); without it, what transformers reads there.

        Raises:
            ConfigError: a file is missing or no safetensors, or the folder does not say which
                files hold its weights.
        """
        folder = Path(checkpointer["checkpoint_dir"])
        if not folder.is_dir():
            raise ConfigError(
                f"checkpointer.checkpoint_dir: {folder} does not exist; download the model first"
            )
        source, faults = cls({}, {}), []
        listed = "files" if checkpointer.get("checkpoint_files") else "dir"
        for path in _listed_files(checkpointer, folder):
            try:
                # safetensors calls every file missing that it cannot open.
                patiently(Path.open, path).close()
                with safe_open(path, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118 (not a dict)
                        source.files[key] = path
                        source.shapes[key] = tuple(file.get_slice(key).get_shape())
            except FileNotFoundError:
                faults.append(f"checkpointer.checkpoint_{listed}: {path} is missing; download it")
            except (SafetensorError, OSError) as error:
                faults.append(
                    f"checkpointer.checkpoint_{listed}: {path} is damaged: {error}; download it "
                    "again"
                )
        if faults:
            raise ConfigError(*faults)
        return source

    def of(self, module: Decoder) -> "SafetensorsSource":
        """What belongs to a model of which blocks are cut off; the rest is not read."""
        wanted = {*file_tensors(module), *hub_pieces(module)}
        files = {key: path for key, path in self.files.items() if key in wanted}
        return SafetensorsSource(files, {key: self.shapes[key] for key in files})

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the weights, whatever the folder is called.

        They come from each file's size and the MiB in its middle: whole files take minutes.
        """
        digest = hashlib.sha256()
        for path in sorted(set(self.files.values()), key=lambda path: path.name):
            size = path.stat().st_size
            digest.update(str(size).encode())
            with open(path, "rb") as file:
                file.seek(size // 2)
                digest.update(file.read(1 << 20))
        return digest.hexdigest()[:16]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its Hugging Face name, on the CPU."""
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def differs(self, name: str, other: torch.Tensor) -> bool:
        """Whether some rows of a tensor, at even distances, are not those of another one.

        They may have been rounded to another dtype.
        """
        own, step = self.tensor_rows(name)
        dtype = min(own.dtype, other.dtype, key=lambda each: each.itemsize)
        return not torch.equal(own.to(dtype), other[::step].to(dtype))

    def tensor_rows(self, name: str) -> tuple[torch.Tensor, int]:
        """Some rows of a tensor, as its file holds it, and how far they are apart."""
        with safe_open(self.files[name], framework="pt") as file:
            part = file.get_slice(name)
            size = part.get_shape()[0]
            step = -(-size // _COMPARED_ROWS)
            return torch.cat([part[row : row + 1] for row in range(0, size, step)]), step

    def read(self, stack: ExitStack) -> Iterator[tuple[str, Reader]]:
        """Every tensor once, (Hugging Face name, what reads tensor[place]), file by file.

        Files that are read of stay open until `stack` closes.
        """
        for path in sorted(set(self.files.values())):
            opened = cache(partial(_opened, path, stack))
            for key in sorted(k for k, where in self.files.items() if where == path):
                read = partial(_read, opened, key)
                yield key, partial(self._grown_part, key, read) if key in self.grown else read

    def _grown_part(self, key: str, read: Reader, place: tuple[Any, ...] = ()) -> torch.Tensor:
        """Of a tensor that grows, whose new rows are the mean of those of the tokens before them.

        transformers' resize_token_embeddings draws its rows around it.
        """
        tensor, ids = read(), self.new_ids
        mean = tensor[: ids.start].mean(0, dtype=torch.float32).to(tensor.dtype)
        grown = torch.cat([tensor, mean.expand(self.shapes[key][0] - len(tensor), -1)])
        grown[ids.start : ids.stop] = mean
        return grown[place] if place else grown


def _opened(path: Path, stack: ExitStack) -> Any:
    return stack.enter_context(safe_open(path, framework="pt"))


def _read(opened: Callable[[], Any], key: str, place: tuple[Any, ...] = ()) -> torch.Tensor:
    """tensor[place]; no more than that is read. () is all."""
    return opened().get_slice(key)[place] if place else opened().get_tensor(key)


def with_new_rows(source: SafetensorsSource, module: Decoder, new_ids: range) -> SafetensorsSource:
    """The source for a model whose embedding has rows for new tokens."""
    if not new_ids:
        return source
    tables = frozenset(key for t in module.tables if (key := file_of(module, f"{t}.weight")))
    shapes = {
        key: (max(shape[0], module.vocab_size), *shape[1:]) if key in tables else shape
        for key, shape in source.shapes.items()
    }
    return replace(source, shapes=shapes, grown=tables, new_ids=new_ids)


class SafetensorsWriter:
    """Writes a safetensors file tensor by tensor, so that only one at a time is in memory.

    Args:
        shapes: of every tensor by name, in the order in which they will come.
        dtypes: of every tensor by name.
    """

    def __init__(
        self, path: Path, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype]
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + math.prod(shape) * dtypes[name].itemsize
            offsets = [begin, end]
            header[name] = {"dtype": DTYPES[dtypes[name]], "shape": shape, "data_offsets": offsets}
        content = json.dumps(header).encode()
        # The format wants the data to begin at a multiple of 8 bytes.
        content = content.ljust(-(-len(content) // 8) * 8)
        self._fault: OSError | None = None
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.write(len(content).to_bytes(8, "little") + content)

    def add(self, tensor: torch.Tensor) -> None:
        """Append the next tensor (CPU). If the disk fails, `close` raises it."""
        try:
            if self._fault is None:
                self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy())
        except OSError as error:
            # The other ranks are gathering the next tensor, and must not wait for this one.
            self._fault = error

    def close(self) -> None:
        """Bring the file to the disk, close it, and raise what went wrong."""
        with self._file:
            if self._fault is not None:
                raise self._fault
            self._file.flush()
            # No other node can do it for this one.
            os.fsync(self._file.fileno())


def _listed_files(checkpointer: dict[str, Any], folder: Path) -> list[Path]:
    listed = checkpointer.get("checkpoint_files")
    if isinstance(listed, dict):
        last = str(listed["max_filename"])
        names = [
            listed["filename_format"].format(str(i).zfill(len(last)), last)
            for i in range(1, int(last) + 1)
        ]
    elif listed:
        names = [str(name) for name in listed]
    else:
        if (folder / ADAPTER_CONFIG).is_file():
            raise ConfigError(
                f"checkpointer.checkpoint_dir: {folder} has an adapter ({ADAPTER_CONFIG}); give "
                "its base model's folder, and the adapter as checkpointer.adapter_checkpoint; if "
                "it is merged into the weights there, remove that file"
            )
        try:
            names = patiently(weight_files, folder)
        except NoWeights as error:
            raise ConfigError(f"checkpointer.checkpoint_dir: {error}") from None
    for name in names:
        if not name.endswith(".safetensors"):
            raise ConfigError(
                f"checkpointer.checkpoint_files: {name} is no safetensors file; pickled weights "
                "are not read, give the model's Hugging Face folder with *.safetensors"
            )
    return [folder / name for name in names]


def mismatches(module: Decoder, source: SafetensorsSource, folder: Path) -> list[str]:
    """Every tensor that is missing, too many, or of another shape than the model's."""
    wanted: dict[str, tuple[int, ...]] = {}
    faults = []
    for key, parts in file_tensors(module).items():
        if key is None:
            faults += [f"{folder}: has nothing for the model's {name}" for name, _ in parts]
        else:
            wanted[key] = hub_shape(parts)
    wanted |= {key: piece.shape for key, piece in hub_pieces(module).items()}
    # A score head that the folder lacks begins anew.
    missing = sorted(wanted.keys() - source.shapes.keys() - {SCORE})
    faults += [f"{folder}: tensor {key} is missing{_if_missing(key)}" for key in missing]
    for key in sorted(source.shapes.keys() - wanted.keys() - set(module.carried_tensors)):
        if not any(fnmatchcase(key, pattern) for pattern in module.ignored_tensors):
            faults.append(f"{folder}: tensor {key} belongs to no part of the model{_OTHERS}")
        elif module.is_tied and key.endswith(_HEAD):
            faults += _untied(module, source, folder, key)
    for key in sorted(wanted.keys() & source.shapes.keys()):
        if wanted[key] != source.shapes[key]:
            faults.append(
                f"{folder}: tensor {key} has shape {list(source.shapes[key])}, "
                f"the model needs {list(wanted[key])}{_OTHERS}"
            )
    more = len(faults) - SHOWN_TENSORS
    return faults if more <= 0 else [*faults[:-more], f"{folder}: {more} more tensors do not fit"]


def _if_missing(key: str) -> str:
    if not key.endswith(_HEAD):
        return _OTHERS
    return "; if the output is the embedding, set tie_word_embeddings to true in its config.json"


def _untied(module: Decoder, source: SafetensorsSource, folder: Path, head: str) -> Iterator[str]:
    """Why a file's output head is no copy of the embedding: transformers takes both then."""
    (table,) = (file_of(module, f"{name}.weight") for name in module.tables)
    if table is None or table not in source.shapes:
        return
    (own, _), (other, _) = (source.tensor_rows(key) for key in (head, table))
    if own.shape != other.shape or not torch.equal(own, other.to(own.dtype)):
        yield (
            f"{folder}: tensor {head} differs from {table}, although config.json ties them; set "
            "tie_word_embeddings to false there"
        )


def seed_of(seed: int, name: str) -> int:
    """A seed for what has this name, so that it is the same on any number of ranks."""
    digest = hashlib.sha256(json.dumps([seed, name]).encode()).digest()
    return int.from_bytes(digest[:7], "little")


@torch.no_grad()
def initialise(module: Decoder, fresh: Decoder, seed: int) -> None:
    """Fill the weights of `module` for training from scratch; each rank copies its own part.

    Args:
        fresh: the same model on the meta device, which is not laid out.
    """
    own = dict(named_parameters(module))
    for name, value in fresh.first_values(seed):
        fill(own[name], value)


@torch.no_grad()
def initialise_adapter(module: Decoder, seed: int, kind: AdapterKind | None = None) -> None:
    """Fill an adapter with its kind's first values, the same on any number of ranks.

    Each parameter has a generator of its own, seeded by `seed` and its name. All ranks call this
    together, after `load`.

    Args:
        kind: the module's own if None.
    """
    kind = kind or module.adapter
    for name, parameter in module.named_parameters():
        if kind is not None and kind.owns(name):
            generator = torch.Generator().manual_seed(seed_of(seed, plain_name(name)))
            fill(parameter, kind.first_value(module, name, parameter.shape, generator))


@torch.no_grad()
def initialise_score(module: Decoder, source: SafetensorsSource, seed: int) -> None:
    """Fill a score head that the folder lacks, the same on any number of ranks.

    As transformers does: from a normal distribution of config.json's initializer_range.
    """
    if (head := module.score_head) is not None and SCORE not in source.shapes:
        first = torch.randn(
            head.weight.shape, generator=torch.Generator().manual_seed(seed_of(seed, SCORE))
        )
        fill(head.weight, first * getattr(module.config, "initializer_range", 0.02))


def fill(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into a parameter, quantised if that is NF4."""
    target = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if nf4.is_packed(parameter):
        # Shards are cut between blocks, so that each rank quantises no more than its own.
        part = local_part(parameter, full.unflatten(-1, (-1, nf4.BLOCK)))
        target.copy_(nf4.quantise(part.flatten(-2).to(target.device)))
    else:
        target.copy_(local_part(parameter, full))
