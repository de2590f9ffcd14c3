"""TRL's losses of policy optimisation and their gradients, for tests/plugins/rl.

    pip install trl==1.16.0 accelerate==1.15.0      # into an environment of its own
    python -m benchmarks.peers.trl_rl

TRL's own `_compute_loss` runs, in fp64 on the CPU, on log-probabilities in the place of a model's.
"""

import importlib.metadata
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VALUES = Path(__file__).parents[2] / "tests/plugins/rl/trl_rl.json"
LENGTHS = [3, 7, 1, 5, 7, 2]
LONGEST = 7
LOW, HIGH, BETA, CAP = 0.2, 0.28, 0.05, 1.1
# By name: TRL's loss_type, importance_sampling_level, beta, and whether sampler's ratios count.
CASES = {
    "grpo": ("grpo", "token", 0.0, False),
    "grpo-kl": ("grpo", "token", BETA, False),
    "dr_grpo": ("dr_grpo", "token", BETA, False),
    "dapo": ("dapo", "token", 0.0, False),
    "dapo-truncated": ("dapo", "token", BETA, True),
    "gspo": ("grpo", "sequence", 0.0, False),
}


def inputs() -> dict[str, Any]:
    """Log-probabilities of six answers [6, 7], padded, and an advantage of each."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    policy = -drawn(len(LENGTHS), LONGEST).abs() - 0.1
    return {
        "policy": policy.tolist(),
        "old": (policy + 0.3 * drawn(*policy.shape)).tolist(),
        "sampled": (policy + 0.3 * drawn(*policy.shape)).tolist(),
        "reference": (policy + 0.5 * drawn(*policy.shape)).tolist(),
        "advantages": drawn(len(LENGTHS)).tolist(),
    }


class Stub:
    """What `_compute_loss` asks of a trainer: one process, no further terms."""

    def __init__(self, log_probs: torch.Tensor, **own: Any) -> None:
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        )
        self.args = SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1
        )
        self._metrics: Any = {"train": defaultdict(list)}
        self.current_gradient_accumulation_steps = 1
        self.top_entropy_quantile, self.max_completion_length = 1.0, LONGEST
        self.epsilon_low, self.epsilon_high = LOW, HIGH
        self._log_probs = log_probs
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return None  # every further term is off

    def _get_per_token_logps_and_entropies(self, *args: Any, **more: Any) -> Any:
        return self._log_probs, torch.zeros_like(self._log_probs), None


def main() -> None:
    """Write the values."""
    from trl import GRPOTrainer

    given = {name: torch.tensor(v, dtype=torch.float64) for name, v in inputs().items()}
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS).unsqueeze(1)).double()
    ids = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.long)
    batch = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}
    batch |= {"advantages": given["advantages"], "num_items_in_batch": mask.sum()}
    found: dict[str, Any] = {}
    for name, (kind, level, beta, truncated) in CASES.items():
        own = {"loss_type": kind, "importance_sampling_level": level, "beta": beta}
        own |= {"use_vllm": truncated, "vllm_importance_sampling_correction": truncated}
        more = {"old_per_token_logps": given["old"]}
        if beta:
            more["ref_per_token_logps"] = given["reference"]
        if truncated:
            ratio = (given["old"] - given["sampled"]).exp().clamp(max=CAP)
            more["importance_sampling_ratio"] = ratio
        policy = given["policy"].clone().requires_grad_()
        stub = Stub(policy, **own)
        loss = GRPOTrainer._compute_loss(stub, stub.model, batch | more)
        loss.backward()
        found[name] = {"loss": loss.item(), "gradient": (policy.grad * mask).tolist()}
    versions = {name: importlib.metadata.version(name) for name in ("trl", "torch")}
    content = {"versions": versions, "inputs": inputs(), "values": found}
    VALUES.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
