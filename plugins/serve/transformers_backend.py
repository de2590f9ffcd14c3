"""transformers serve on a Unix socket: -m plugins.serve.transformers_backend SOCKET MODEL

transformers serve itself listens on a port, without a key. It seeds the one generator of all
requests when a request comes in, while another one may draw from it, ends a text at a stop string
that began in the prompt, and generates beyond what the model takes. Here each request has its own
seed and its own stop strings, and ends there; one that is too long is refused. Virtual tokens of
prompt and prefix tuning, which transformers cannot load, are added by PEFT.
"""

import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import Request
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving import model_manager, utils

from plugins.serve import backends
from runspec import adapters, devices, weights
from runspec.files import patient_json


class Stops(StoppingCriteria):
    """Ends a text whose newest token completes a stop string.

    Args:
        prompt: number of the prompt's tokens.
    """

    def __init__(self, tokenizer: Any, texts: list[str], prompt: int) -> None:
        self.tokenizer, self.texts, self.prompt = tokenizer, texts, prompt
        # A character may have 4 tokens of one byte each; special tokens have no text.
        self.tail = 4 * max(map(len, texts)) + 32

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return for each text [batch] whether it is at its end."""
        ended = []
        for ids in input_ids:
            newest = ids[max(self.prompt, len(ids) - self.tail) :]
            text = self.tokenizer.decode(newest, skip_special_tokens=True)
            ended.append(any(each in text for each in self.texts))
        return torch.tensor(ended, device=input_ids.device)


class TooLong(Exception):
    """A request has more tokens than the model takes."""


class Manager(utils.GenerateManager):
    """Generates answers one at a time on one thread, each with its own seed and stop strings."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        inputs = self._begun(model, processor, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *more, **named)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        inputs = self._begun(model, processor, inputs, gen_config)
        # It submits before it waits, so that no other request sets the seed in between.
        return await super().generate_non_streaming(
            model, processor, inputs, gen_config, *more, **named
        )

    def _begun(self, model: Any, processor: Any, inputs: Any, gen_config: Any) -> Any:
        """Note a request's seed, limit its answer to the model's positions, add its stops."""
        self._seed = getattr(gen_config, "seed", None)
        prompt = inputs["input_ids"].shape[-1]
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int):
            before = getattr(getattr(model, "active_peft_config", None), adapters.NUM_VIRTUAL, 0)
            if (room := positions - before - prompt) < 1:
                most = f"the model takes {positions - before:,} with its answer"
                raise TooLong(f"the request has {prompt:,} tokens, and {most}: shorten it")
            gen_config.max_new_tokens = min(gen_config.max_new_tokens or room, room)
        if not (texts := getattr(gen_config, "stop_texts", None)):
            return inputs
        stops = Stops(getattr(processor, "tokenizer", processor), texts, prompt)
        return {**inputs, "stopping_criteria": StoppingCriteriaList([stops])}

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().submit(_seeded(fn, self._seed), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().async_submit(_seeded(fn, self._seed), *args, **kwargs)


class Models(model_manager.ModelManager):
    """Loads models, and adapters of virtual tokens over their base model."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._adapted: tuple[Any, Any] = (None, None)
        self._lock = threading.Lock()
        super().__init__(*arguments, **named)

    def load_model_and_processor(
        self, model_id_and_revision: str, *more: Any, **named: Any
    ) -> tuple[Any, Any]:
        """Return the model of a name and its processor; loaded once."""
        name, _, revision = model_id_and_revision.rpartition("@")
        settings = patient_json(Path(name) / "adapter_config.json")
        if settings is None or settings.get("peft_type") not in _VIRTUAL:
            loaded: tuple[Any, Any] = super().load_model_and_processor(
                model_id_and_revision, *more, **named
            )
            return loaded
        from peft import PeftModel

        base = f"{settings['base_model_name_or_path']}@{revision}"
        model, processor = super().load_model_and_processor(base, *more, **named)
        with self._lock:
            # A base that was unloaded while nobody asked comes back as another object.
            if self._adapted[0] is not model:
                self._adapted = model, PeftModel.from_pretrained(model, name).eval()
            return self._adapted[1], processor


# PEFT's names of the kinds that transformers does not load.
_VIRTUAL = {kind.peft_type for kind in (adapters.PROMPT, adapters.PREFIX)}


def _seeded(fn: Callable[..., Any], seed: int | None) -> Callable[..., Any]:
    """Return a function that seeds the generating thread, and generates."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # A request without a seed must not depend on the seed of the one before.
        torch.seed() if seed is None else torch.manual_seed(seed)
        return fn(*args, **kwargs)

    return call


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """Return to the client why its messages are refused, such as two answers in a row."""
    by_template = isinstance(error, TemplateError)
    why = f"messages: the chat template refuses them: {error}" if by_template else str(error)
    return JSONResponse({"detail": why}, 400)


def unusable(arguments: list[str]) -> str:
    """Return why `--device auto` would answer on the CPUs of a node with GPUs; "" if not."""
    auto = ("--device", "auto") in itertools.pairwise(arguments)
    found = devices.gpus() if auto and not torch.cuda.is_available() else []
    if not found:
        return ""
    return (
        f"this node has GPUs ({', '.join(found)}), and torch {torch.__version__} of "
        f"{sys.executable} cannot use them: install a build for the driver, or set device=cpu"
    )


def too_large(arguments: list[str]) -> str:
    """Return why `--device auto` would answer from the CPU's memory or a disk; "" if not.

    accelerate puts there without a warning what the GPUs do not hold, and copies it for each token.
    """
    given = dict(itertools.pairwise(arguments))
    if given.get("--device") != "auto" or not torch.cuda.is_available():
        return ""
    folder, size = Path(arguments[0]), 4 if given.get("--dtype") == "float32" else 2
    try:
        parameters = weights.parameter_count(folder)
    except (OSError, ValueError, KeyError):
        return ""  # transformers says what is wrong with it
    found = torch.cuda.device_count()
    memory = min(torch.cuda.get_device_properties(each).total_memory for each in range(found))
    if (needed := weights.ranks_for(parameters, size, memory)) <= found:
        return ""
    return (
        f"{folder} has {parameters * size / 2**30:.0f} GiB of weights and needs {needed} GPUs of "
        f"{memory / 2**30:.0f} GiB, and there are {found}: use --gpus-per-node {needed}, or larger "
        "GPUs"
    )


def main() -> None:
    """Start it with uvicorn's option for Unix sockets."""
    socket, *arguments = sys.argv[1:]
    if why := unusable(arguments) or too_large(arguments):
        Path(socket).with_name(backends.REASON).write_text(why, encoding="utf-8")
        sys.exit(f"error: {why}")
    # As in training: on H100 and B200 cuDNN's attention makes a new graph for each length, and a
    # token that is generated is a new length (pytorch#155958).
    torch.backends.cuda.enable_cudnn_sdp(False)
    config = uvicorn.Config

    def on_socket(app: Any, **more: Any) -> uvicorn.Config:
        for kind in (TemplateError, TooLong):
            app.add_exception_handler(kind, _refused)
        return config(app, uds=socket, **more)

    uvicorn.Config = on_socket  # type: ignore[misc,assignment]
    utils.GenerateManager = Manager
    model_manager.ModelManager = Models
    from transformers.cli.transformers import main as transformers

    sys.argv = ["transformers", "serve", *arguments]
    transformers()


if __name__ == "__main__":
    main()
