"""How an engine is started in the recipe's environment: by serving, and for rollouts."""

import os
import sys
from collections.abc import Mapping

# The lines are the words of a command that starts Python in the recipe's environment.
STARTS_PYTHON = "COOKBOOK_ENGINE"
# vLLM's values of --max-lora-rank; its default is 16 (vllm.config.lora.MaxLoRARanks).
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def python(variables: Mapping[str, str]) -> list[str]:
    """Return the words of the command that starts the engine's Python, with these variables."""
    lines = os.environ.get(STARTS_PYTHON, "").splitlines() or [sys.executable]
    # Of the replica's own variables, a container gets those that the node's script had.
    return [*lines[:-1], "env", *(f"{k}={v}" for k, v in variables.items()), lines[-1]]


def vllm_lora(rank: int) -> list[str]:
    """Return vLLM's options for adapters of this rank."""
    most = next((each for each in _VLLM_RANKS if each >= rank), _VLLM_RANKS[-1])
    return ["--enable-lora", "--max-lora-rank", str(most)]
