"""The transformers backend serves prompt and prefix tuning as PEFT computes them."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.launcher.kit import until
from trainer import demo

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_an_adapter_of_virtual_tokens_is_served(kind: str, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = tmp_path / "base"
    demo.make(base, ROOT / "configs/datasets/slurm_qa.jsonl", seed=0)
    settings = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[kind]
    torch.manual_seed(0)
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        settings(task_type="CAUSAL_LM", num_virtual_tokens=5),
    )
    model.save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer("What is a node?", return_tensors="pt")
    length = ids["input_ids"].shape[1]
    wanted = model.eval().generate(**ids, max_new_tokens=12, do_sample=False)[0, length:]
    plain = model.base_model.generate(**ids, max_new_tokens=12, do_sample=False)[0, length:]
    assert wanted.tolist() != plain.tolist()

    socket, name = tmp_path / "backend.sock", str(tmp_path / "adapter")
    argv = [sys.executable, "-m", "plugins.serve.transformers_backend", str(socket), name]
    backend = subprocess.Popen([*argv, "--device", "cpu", "--dtype", "float32"], cwd=ROOT)
    try:
        until(socket.exists, 60)
        asked = {"model": name, "prompt": "What is a node?", "max_tokens": 12, "temperature": 0.0}
        found = asyncio.run(answer(socket, asked))
        text = found["choices"][0]["text"]
        assert text == tokenizer.decode(wanted, skip_special_tokens=True)
    finally:
        backend.terminate()
        backend.wait(30)


async def answer(socket: Path, asked: dict[str, Any]) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as client,
        client.post("http://backend/v1/completions", json=asked) as reply,
    ):
        assert reply.status == 200, await reply.text()
        return await reply.json()
