"""The command of vLLM by the documentation of 0.30, and the environment of a backend."""

import json
import sys
from pathlib import Path

from plugins.serve import backends, parameters
from plugins.serve.recipe_keys import SERVE

SETTINGS = {key: entry.default for key, entry in SERVE.items()} | {"endpoint": "intent"}


def adapter(folder: Path) -> Path:
    folder.mkdir()
    settings = {"base_model_name_or_path": "/models/base", "r": 8, "rank_pattern": {"qkv_proj": 24}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_vllm_serves_an_adapter_under_the_endpoints_name_and_not_its_base(tmp_path):
    config = {**SETTINGS, "engine": "vllm", "model": str(adapter(tmp_path / "a"))}
    config |= {"engine_args": ["--max-model-len", 4096]}
    found = backends.command(config, tmp_path, 2)
    assert found.argv == [
        *("-m", "vllm.entrypoints.cli.main", "serve", "/models/base"),
        *("--uds", str(tmp_path / "backend.sock"), "--tensor-parallel-size", "2"),
        *("--served-model-name", "intent-base", "--enable-lora", "--max-lora-rank", "32"),
        *("--lora-modules", f"intent={tmp_path / 'a'}", "--dtype", "auto"),
        *("--max-model-len", "4096"),
    ]
    assert (found.model, found.socket) == ("intent", tmp_path / "backend.sock")
    # The token that ends an answer may be another one than the base's.
    (tmp_path / "a/generation_config.json").write_text('{"eos_token_id": 7}')
    argv = backends.command(config, tmp_path, 2).argv
    assert argv == [
        *found.argv[:-4],
        *("--generation-config", str(tmp_path / "a"), "--dtype", "auto", "--max-model-len", "4096"),
    ]
    assert parameters.parameters_of(config, "intent").defaults == {"eos_token_id": 7}


def test_each_server_sees_its_own_gpus():
    """Also where the site's Slurm sets no CUDA_VISIBLE_DEVICES: else all would use the first."""
    assert backends.visible([2, 3], "GPU-a,GPU-b,5,7") == "5,7"
    assert backends.visible([2, 3], None) == "2,3"
    assert backends.visible([0], "") == ""


def test_a_backend_starts_in_the_recipes_environment(monkeypatch):
    words = "srun\n--overlap\n/env/bin/python"
    monkeypatch.setenv("COOKBOOK_BACKEND", words)
    assert backends.python({"A": "1 2"}) == [
        "srun",
        "--overlap",
        "env",
        "A=1 2",
        "/env/bin/python",
    ]
    monkeypatch.delenv("COOKBOOK_BACKEND")
    assert backends.python({}) == ["env", sys.executable]
