"""transformers serve on a Unix socket: python -m serving.transformers_engine SOCKET MODEL [options]

transformers serve itself listens on a port, without a key. It seeds the one generator of all
requests when a request comes in, while another one may draw from it, ends a text at a stop string
that began in the prompt, and generates beyond what the model takes. Here each request has its own
seed and its own stop strings, and ends there.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import uvicorn
from fastapi import Request
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving import utils


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


class Manager(utils.GenerateManager):
    """Generates answers one at a time on one thread, each with its own seed and stop strings."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        self._seed = getattr(gen_config, "seed", None)
        _limit(model, inputs, gen_config)
        inputs = _with_stops(processor, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *more, **named)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        self._seed = getattr(gen_config, "seed", None)
        _limit(model, inputs, gen_config)
        inputs = _with_stops(processor, inputs, gen_config)
        # It submits before it waits, so that no other request sets the seed in between.
        return await super().generate_non_streaming(
            model, processor, inputs, gen_config, *more, **named
        )

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().submit(_seeded(fn, self._seed), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().async_submit(_seeded(fn, self._seed), *args, **kwargs)


def _seeded(fn: Callable[..., Any], seed: int | None) -> Callable[..., Any]:
    """Return a function that seeds the generating thread, and generates."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # A request without a seed must not depend on the seed of the one before.
        torch.seed() if seed is None else torch.manual_seed(seed)
        return fn(*args, **kwargs)

    return call


def _limit(model: Any, inputs: Any, gen_config: Any) -> None:
    """End an answer where the model's positions end."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and gen_config.max_new_tokens is not None:
        room = max(1, positions - inputs["input_ids"].shape[-1])
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, room)


def _with_stops(processor: Any, inputs: Any, gen_config: Any) -> Any:
    texts = getattr(gen_config, "stop_texts", None)
    if not texts:
        return inputs
    tokenizer = getattr(processor, "tokenizer", processor)
    stops = Stops(tokenizer, texts, inputs["input_ids"].shape[-1])
    return {**inputs, "stopping_criteria": StoppingCriteriaList([stops])}


async def _not_by_the_template(request: Request, error: Exception) -> JSONResponse:
    """Return the chat template's error to the client, such as two answers in a row."""
    return JSONResponse({"detail": f"messages: the chat template refuses them: {error}"}, 400)


def main() -> None:
    """Start it with uvicorn's option for Unix sockets."""
    socket, *arguments = sys.argv[1:]
    config = uvicorn.Config

    def on_socket(app: Any, **more: Any) -> uvicorn.Config:
        app.add_exception_handler(TemplateError, _not_by_the_template)
        return config(app, uds=socket, **more)

    uvicorn.Config = on_socket  # type: ignore[misc,assignment]
    utils.GenerateManager = Manager
    from transformers.cli.transformers import main as transformers

    sys.argv = ["transformers", "serve", *arguments]
    transformers()


if __name__ == "__main__":
    main()
