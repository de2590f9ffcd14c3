"""Parameters of requests: which ones a backend has, and which ones the front implements.

For transformers no parameter is dropped silently: it is passed on, implemented by the front,
without effect by its value, or refused by name. vLLM gets all, and refuses wrong values itself.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugins.serve.backends import Model
from plugins.serve.request import CHAT, BadRequest, prompts, stops
from runspec.files import patient_json
from runspec.hints import nearest
from runspec.storage import ABSENT, patiently

# For the log only.
_DESCRIPTIVE = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
# Values that request the default behavior.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,), "modalities": (["text"],), "store": (False,),
    "service_tier": ("auto", "default"), "function_call": ("none",),
}  # fmt: skip
_DONE_HERE = {"model", "stream", "stream_options", "stop"}
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"}
_LENGTHS = {"max_tokens", "max_completion_tokens"}
_OF_CHATS = {"messages", "tools", "tool_choice", "chat_template_kwargs"}
_INSTEAD = {
    "n": "send the request again, with another seed, or serve it with engine=vllm",
    "frequency_penalty": "use repetition_penalty",
    "presence_penalty": "use repetition_penalty",
    "response_format": "serve it with engine=vllm, or say in the prompt what form the answer has",
    "tool_choice": "use auto or none, or serve it with engine=vllm",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "suffix": "put it into the prompt in the form that the model was trained on",
    "store": "requests are logged unless the endpoint has log=false",
    "reasoning_effort": "use chat_template_kwargs, if the chat template has such a key",
}
# Arguments of apply_chat_template that are not passed to the template.
_OF_TEMPLATES = {"conversation", "tools", "documents", "chat_template", "add_generation_prompt"}
_OF_TEMPLATES |= {"continue_final_message", "tokenize", "padding", "truncation", "max_length"}
_OF_TEMPLATES |= {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
_OF_TEMPLATES |= {"tokenizer_kwargs", "processor_kwargs", "load_audio_from_video", "messages"}
# Below this temperature all probabilities but the largest are zero in float32; 0 would make logits
# infinite.
_GREEDY = 1e-4
# The minimum of transformers serve for a request without max_tokens.
_NEW_TOKENS = 1024


@dataclass(frozen=True)
class Plan:
    """The request to a backend for one request of a client."""

    body: dict[str, Any]
    stream: bool
    # Whether a stream ends with the usage.
    usage: bool
    # Strings at which the front cuts the text.
    stops: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a backend."""

    # transformers or vllm.
    backend: str
    # Its name of the model.
    model: str
    # The model's config.json.
    facts: Mapping[str, Any] = field(default_factory=dict)
    # The model's generation_config.json.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Its chat template, None if nobody knows.
    template: str | None = None
    # Of one answer at most, None for no limit.
    seconds: float | None = None

    @property
    def length(self) -> int:
        """The most tokens of an answer to a request that names no number."""
        return max(_NEW_TOKENS, int(self.defaults.get("max_new_tokens") or 0))

    def plan(self, path: str, asked: Mapping[str, Any]) -> Plan:
        """Return the plan of a valid request; BadRequest names an unsupported parameter."""
        if self.backend == "transformers":
            return self._transformers(path, asked)
        # Two requests of one id would be one for vLLM; the front's are unique.
        body = {key: value for key, value in asked.items() if key != "request_id"}
        body["model"] = self.model
        if asked.get("stream"):
            # The log has the backend's counts.
            body["stream_options"] = {"include_usage": True}
        return Plan(body, *_streamed(asked))

    def _supported(self, asked: Mapping[str, Any], supported: set[str]) -> dict[str, Any]:
        """Return the supported parameters; refuse others that have an effect."""
        kept = {}
        for name, value in asked.items():
            if name in supported:
                kept[name] = value
            elif name not in _DESCRIPTIVE and not _without_effect(name, value):
                raise BadRequest(self._refusal(name, value, supported), name)
        return kept

    def _refusal(self, name: str, value: Any, supported: set[str]) -> str:
        shown = json.dumps(value, ensure_ascii=False)
        shown = f"{name}={shown}" if len(shown) < 40 else name
        hint = nearest(name, supported).strip(" ()")
        instead = _INSTEAD.get(name) or hint or "leave it out"
        return f"the backend {self.backend} does not do {shown}: {instead}"

    def _transformers(self, path: str, asked: Mapping[str, Any]) -> Plan:
        supported = _DONE_HERE | _LENGTHS | _SAMPLING | {"logit_bias"}
        supported |= _OF_CHATS if path == CHAT else {"prompt"}
        kept = self._supported(asked, supported)
        stream, usage = _streamed(asked)
        body: dict[str, Any] = {"model": self.model, "stream": stream}
        for name in kept.get("chat_template_kwargs", ()):
            if name in _OF_TEMPLATES or (self.template and name not in self.template):
                place = f"chat_template_kwargs.{name}"
                raise BadRequest(f"the chat template takes no {place}", place)
            body["chat_template_kwargs"] = kept["chat_template_kwargs"]
        if kept.get("tools") and kept.get("tool_choice", "auto") != "none":
            if kept.get("tool_choice", "auto") != "auto":
                refusal = self._refusal("tool_choice", kept["tool_choice"], supported)
                raise BadRequest(refusal, "tool_choice")
            if self.template and "tools" not in self.template:
                raise BadRequest("the chat template of the model has no tools", "tools")
            body["tools"] = kept["tools"]
        size = self.facts.get("vocab_size")
        if isinstance(size, int) and any(int(each) >= size for each in kept.get("logit_bias", ())):
            raise BadRequest(f"logit_bias: the model has {size:,} tokens", "logit_bias")
        body |= {**self._text(path, asked), "generation_config": self._generation(kept)}
        return Plan(body, stream, usage, stops(kept))

    def _generation(self, kept: Mapping[str, Any]) -> str:
        """Return generation_config, which is JSON in a request to transformers serve.

        plugins.serve.transformers_backend reads its keys seed and stop_texts.
        """
        most = kept.get("max_completion_tokens", kept.get("max_tokens"))
        config: dict[str, Any] = {"max_new_tokens": self.length if most is None else most}
        if self.seconds is not None:
            # Nobody waits any more, and the next request waits for this one.
            config["max_time"] = self.seconds
        if "repetition_penalty" in kept:
            config["repetition_penalty"] = float(kept["repetition_penalty"])
        if stops(kept):
            config["stop_texts"] = stops(kept)
        if kept.get("logit_bias"):
            pairs = kept["logit_bias"].items()
            config["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in pairs]
        if kept.keys() & (_SAMPLING - {"repetition_penalty"}):
            heat = float(kept.get("temperature", self.defaults.get("temperature") or 1.0))
            config["do_sample"] = heat >= _GREEDY
            if config["do_sample"]:
                # The default of generate() is 50.
                top = int(kept.get("top_k", self.defaults.get("top_k") or 0))
                config |= {"temperature": heat, "top_k": max(0, top)}
                config |= {key: float(kept[key]) for key in ("top_p", "min_p") if key in kept}
        if "seed" in kept:
            config["seed"] = int(kept["seed"])
        return json.dumps(config)

    def _text(self, path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        if path == CHAT:
            messages = [self._message(k, each) for k, each in enumerate(asked["messages"])]
            return {"messages": messages}
        prompt, *others = prompts(asked)
        if others or not isinstance(prompt, str):
            raise BadRequest("the backend transformers takes one prompt, as text", "prompt")
        return {"prompt": prompt}

    def _message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        known = {key: value for key, value in message.items() if value is not None}
        # Chat templates leave out the reasoning of earlier turns.
        known.pop("reasoning_content", None)
        for name in known:
            if name not in ("role", "content", "tool_calls", "tool_call_id"):
                place = f"messages[{number}].{name}"
                raise BadRequest(f"the backend transformers does not do {place}", place)
        parts = known.get("content")
        for part in parts if isinstance(parts, list) else ():
            # A picture's address would be opened by the backend: the node's files, its network.
            if part["type"] != "text":
                place = f"messages[{number}].content"
                raise BadRequest(f"{place}: engine=transformers takes text only", place)
        return known


def _streamed(asked: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether the answer is a stream, and whether it ends with the usage."""
    options = asked.get("stream_options", {})
    return asked.get("stream", False), options.get("include_usage", False)


def _without_effect(name: str, value: Any) -> bool:
    # 0 equals False, and asks for something else.
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool)
        for each in _WITHOUT_EFFECT.get(name, ())
    )


def parameters_of(config: Mapping[str, Any], name: str) -> Parameters:
    """Return the parameters of an endpoint's backend.

    Args:
        name: the backend's name of the model.
    """
    model, backend = Path(str(config["model"])), str(config["engine"])
    base = Model.of(model).base
    return Parameters(
        backend,
        name,
        patient_json(base / "config.json") or {},
        patient_json(model / _DEFAULTS) or patient_json(base / _DEFAULTS) or {},
        _template(model, base),
        float(config["request_timeout_s"]),
    )


_DEFAULTS = "generation_config.json"


def _template(*folders: Path) -> str | None:
    """Return the chat template of the first folder that has one."""
    for folder in folders:
        with suppress(*ABSENT):
            return patiently(Path.read_text, folder / "chat_template.jinja")
        template = (patient_json(folder / "tokenizer_config.json") or {}).get("chat_template")
        if isinstance(template, str):
            return template
    return None
