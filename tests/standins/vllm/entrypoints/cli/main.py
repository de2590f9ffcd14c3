"""A stand-in of vLLM's server by its protocol (0.30.0), which has no build for a CPU on PyPI.

It has the options, endpoints and fields that the kit uses, refuses all others, and generates by
transformers. Facts from vllm/entrypoints/openai/completion/protocol.py, serve/lora and serve/dev.
"""

import argparse
import json
import os
import socketserver
import tempfile
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from plugins.rl import gathered
from plugins.rl.rollouts import sample
from plugins.rl.samplers import Request

FIELDS = {
    *("model", "prompt", "seed", "temperature", "max_tokens", "stop_token_ids", "ignore_eos"),
    *("logit_bias", "logprobs", "return_token_ids", "skip_special_tokens"),
}


class Refused(Exception):
    """What vLLM answers with status 400."""


class Model:
    """The base model, its adapters, and whether prompts are kept by older weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.lock, self.stale = args, threading.Lock(), False
        self.adapters: dict[str, str] = {}
        self.base = self.read(Path(args.model))
        self.model: Any = self.base

    def read(self, folder: Path) -> Any:
        dtype = getattr(torch, self.args.dtype)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> str:
        settings = json.loads((Path(lora_path) / "adapter_config.json").read_text())
        if not self.args.enable_lora or settings["r"] > self.args.max_lora_rank:
            raise Refused(f"LoRA rank {settings['r']} is greater than {self.args.max_lora_rank}")
        if settings.get("use_dora") or settings.get("modules_to_save"):
            raise Refused("vLLM does not yet support DoRA or modules_to_save")
        own = f"adapter{len(self.adapters)}_{os.urandom(4).hex()}"
        if isinstance(self.model, PeftModel):
            self.model.load_adapter(lora_path, own)
        else:
            self.model = PeftModel.from_pretrained(self.base, lora_path, own).eval()
        self.adapters[lora_name] = own
        return f"Success: LoRA adapter '{lora_name}' added successfully."

    def unload_lora_adapter(self, lora_name: str) -> str:
        self.model.delete_adapter(self.adapters.pop(lora_name))
        return f"Success: LoRA adapter '{lora_name}' removed successfully."

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        (name, path) = next(iter(kwargs.items()))
        if (method, name) != ("reload_weights", "weights_path"):
            raise Refused(f"no method {method}({name})")
        with tempfile.TemporaryDirectory() as folder:
            for file in [Path(self.args.model) / "config.json", *Path(path).glob("model*")]:
                (Path(folder) / file.name).symlink_to(file.absolute())
            self.base = self.model = self.read(Path(folder))
        self.stale = True
        return {"results": [None]}

    def reset_prefix_cache(self) -> dict[str, Any]:
        self.stale = False
        return {"success": True}

    def completions(self, **body: Any) -> dict[str, Any]:
        if unknown := body.keys() - FIELDS:
            raise Refused(f"unknown fields {sorted(unknown)}")
        if self.stale:
            raise Refused("the prefix cache is of other weights")
        if body["model"] not in ("base", *self.adapters):
            raise Refused(f"The model `{body['model']}` does not exist.")
        if isinstance(self.model, PeftModel):
            self.model.set_adapter(self.adapters[body["model"]])
        if not body["ignore_eos"] or body["logprobs"] != 0 or not body["return_token_ids"]:
            raise Refused("other fields than the kit's")
        never = [int(token) for token, bias in (body.get("logit_bias") or {}).items() if bias < -99]
        vocabulary = min(never, default=self.base.config.vocab_size)
        seed, greedy = body.get("seed"), body["temperature"] == 0
        temperature = 1.0 if greedy else body["temperature"]
        engine = gathered.Generator(torch.device("cpu"))
        engine.model = self.model
        ends = gathered.Ends(body["stop_token_ids"], 0)
        seeds = None if greedy else [int(seed)]
        asked = Request([body["prompt"]], seeds, body["max_tokens"], vocabulary, temperature)
        with self.lock:
            (tokens,), (log_probs,), _ = sample(engine, asked, ends)
        values = {"token_ids": tokens, "logprobs": {"token_logprobs": log_probs}}
        return {"choices": [{**values, "finish_reason": "stop"}]}


def handler(model: Model) -> type[BaseHTTPRequestHandler]:
    calls: dict[str, Any] = {"/v1/completions": model.completions}
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        calls |= {"/collective_rpc": model.collective_rpc}
        calls |= {"/reset_prefix_cache": model.reset_prefix_cache}
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "True":
        calls |= {"/v1/load_lora_adapter": model.load_lora_adapter}
        calls |= {"/v1/unload_lora_adapter": model.unload_lora_adapter}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200 if self.path == "/health" else 404, "")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            if self.path not in calls:
                self.send(404, json.dumps({"detail": "Not Found"}))
                return
            try:
                answer = calls[self.path](**body)
            except Refused as error:
                self.send(400, json.dumps({"error": {"message": str(error)}}))
                return
            self.send(200, answer if isinstance(answer, str) else json.dumps(answer))

        def send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def address_string(self) -> str:
            return "engine"

        def log_message(self, *arguments: Any) -> None: ...

    return Handler


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 512


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--uds", required=True)
    parser.add_argument("--served-model-name", choices=["base"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    # Others would give other numbers than the trainer's softmax.
    parser.add_argument("--logprobs-mode", choices=["processed_logprobs"], required=True)
    parser.add_argument("--generation-config", choices=["vllm"], required=True)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    Server(args.uds, handler(Model(args))).serve_forever()


if __name__ == "__main__":
    main()
