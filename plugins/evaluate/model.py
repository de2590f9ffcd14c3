"""One model that answers: a folder as transformers reads it, or an adapter with its base."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from plugins.evaluate.samples import Sample
from runspec import weights
from runspec.files import patient_json
from trainer.data.folder import read_tokenizer
from trainer.errors import ConfigError
from trainer.inference import loading
from trainer.layers.batch import IGNORE_INDEX


def fingerprint(folder: Path) -> str:
    """Return a hash of names, sizes and times of a model's files, an adapter's base included."""
    seen = [
        f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in weights.content_files(folder)
    ]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]


class Answerer:
    """A model on one device, or spread over the GPUs of the node, and how it answers.

    Raises:
        ConfigError: the folder has no model that transformers can load.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], device: torch.device, spread: bool = False
    ) -> None:
        loading.stay_offline_and_quiet()
        self.settings, self.device = settings, device
        adapter = patient_json(folder / "adapter_config.json")
        base = Path(str(adapter["base_model_name_or_path"])) if adapter else folder
        if not (base / "config.json").is_file():
            raise ConfigError(f"{base}: has no model (config.json is missing)")
        try:
            # An adapter has a tokenizer of its own if the base has another one.
            own = (folder / "tokenizer.json").is_file()
            self.tokenizer_folder = folder if own else base
            self.tokenizer = read_tokenizer(self.tokenizer_folder, padding_side="left")
            dtype = loading.DTYPES[settings["dtype"]]
            model = loading.language_model(base, dtype, device, spread)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(f"{base}: transformers cannot load it: {error}") from None
        self.ends, self._end = loading.end_tokens(
            model, self.tokenizer, settings["template"] != "none"
        )
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if settings["temperature"] == 0:
            loading.decode_greedily(model, self.ends, self.tokenizer.pad_token_id)
        # Virtual tokens of prompt and prefix tuning take positions, too.
        virtual = (adapter or {}).get("num_virtual_tokens") or 0
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
        self.limit = int(positions or 2**20) - virtual
        if adapter:
            model = loading.with_adapter(model, folder).eval()
            model = model if spread else model.to(device)
        self.model = model

    def prompt_text(self, sample: Sample, task: dict[str, Any]) -> str:
        """Return what the model reads before it answers."""
        if self.settings["template"] == "none":
            return sample.prompt
        if not self.tokenizer.chat_template:
            raise ConfigError("the model has no chat template: set template: none")
        turns = [{"role": "system", "content": task["system"]}] if task.get("system") else []
        turns += sample.messages or [{"role": "user", "content": sample.prompt}]
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)

    @torch.inference_mode()
    def answers(self, samples: list[Sample], task: dict[str, Any]) -> list[dict[str, Any]]:
        """Answer a batch of samples.

        Returns:
            answer, and too_long if the prompt leaves no room.
        """
        # The batch's own seed, so that an answer depends on no other batch.
        torch.manual_seed(self.settings["seed"] * 1_000_003 + samples[0].index)
        texts = [self.prompt_text(each, task) for each in samples]
        ids = [self._ids(text) for text in texts]
        room = self.limit - self.settings["max_new_tokens"]
        fits = [k for k, each in enumerate(ids) if len(each) <= room]
        rows: list[dict[str, Any]] = [{"answer": "", "too_long": True} for _ in ids]
        if not fits:
            return rows
        batch = self.tokenizer.pad({"input_ids": [ids[k] for k in fits]}, return_tensors="pt")
        hot = {"do_sample": True, **{key: self.settings[key] for key in ("temperature", "top_p")}}
        generated = self.model.generate(
            **batch.to(self.device),
            max_new_tokens=self.settings["max_new_tokens"],
            eos_token_id=self.ends or None,
            pad_token_id=self.tokenizer.pad_token_id,
            **(hot if self.settings["temperature"] > 0 else {}),
        )
        width = batch["input_ids"].shape[1]
        for k, row in zip(fits, generated[:, width:].tolist(), strict=True):
            rows[k] = {"answer": self.tokenizer.decode(row, skip_special_tokens=True).strip()}
        return rows

    def likelihoods(self, samples: list[Sample], task: dict[str, Any]) -> list[dict[str, Any]]:
        """Return nll (nats, summed) and tokens of each sample's reference, given its prompt."""
        rows = []
        for sample in samples:
            prompt = self._ids(self.prompt_text(sample, task))
            answer = self.tokenizer(sample.reference, add_special_tokens=False)["input_ids"]
            if self.settings["template"] == "chat" and self._end is not None:
                answer = [*answer, self._end]
            if not answer or len(prompt) + len(answer) > self.limit:
                rows.append({"nll": 0.0, "tokens": 0, "too_long": bool(answer)})
                continue
            labels = [IGNORE_INDEX] * len(prompt) + answer
            rows.append({"nll": -self.value(prompt + answer, labels), "tokens": len(answer)})
        return rows

    @torch.inference_mode()
    def value(self, tokens: Sequence[int], labels: Sequence[int]) -> float:
        """The log-probability (nats, summed) of a document's tokens that have labels."""
        ids = torch.tensor([list(tokens)], device=self.device)
        targets = torch.tensor(list(labels), device=self.device)[1:]
        logits = self.model(input_ids=ids).logits[0, :-1][targets != IGNORE_INDEX].float()
        targets = targets[targets != IGNORE_INDEX]
        return -float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))

    def _ids(self, text: str) -> list[int]:
        # A chat template writes the first token itself.
        special = self.settings["template"] == "none"
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
