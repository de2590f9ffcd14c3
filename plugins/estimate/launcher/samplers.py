"""Memory of samplers, on nodes of their own or in turns with the ranks."""

from dataclasses import replace
from math import floor

from plugins.estimate.launcher.memory import Terms, generation, state_of
from plugins.estimate.launcher.step_config import GIB, StepConfig
from runspec.devices import share_beside
from runspec.layout import Layout


def sampler(step: StepConfig, memory: float) -> Terms:
    """Memory of a GPU of this size while a sampler generates; empty without samplers."""
    if step.vllm:
        terms = _vllm(step)
        if step.vllm_share:
            given = step.vllm_share * memory - sum(terms.values())
            terms["keys and values"] += max(given, 0.0)
        if step.vllm_in_turns:
            terms["trainer's state"] = beside_vllm(step)
        return terms
    if not step.sampling_gpus:
        return {}
    on_gpu = _base_model(step) if _base_is_on_gpu(step, memory) else 0.0
    return {**generation(step), "base model": on_gpu}


def _vllm(step: StepConfig) -> Terms:
    """Memory that vLLM needs on each of its GPUs for one answer; the rest serves more answers."""
    one = generation(replace(step, vllm=False, generation_batch=1))
    return {name: size / step.rollout_gpus for name, size in one.items()}


def beside_vllm(step: StepConfig) -> float:
    """Memory of a GPU outside of vLLM's share while vLLM generates in turns."""
    return sum(state_of(step).values())


def vllm_share(step: StepConfig, memory: float) -> float:
    """The share of a GPU of this size that vLLM takes in turns."""
    return step.vllm_share or share_beside(beside_vllm(step) / GIB, memory / GIB)


def answers_of_vllm(step: StepConfig, memory: float) -> int:
    """Number of answers whose keys and values fit that share; 0: none, or not even the weights."""
    one = _vllm(step)
    more = vllm_share(step, memory) * memory - sum(one.values())
    return max(0, 1 + floor(more / one["keys and values"]))


def generates(step: StepConfig, memory: float) -> bool:
    """Whether vLLM in turns, if there is one, has room for an answer."""
    return not step.vllm_in_turns or answers_of_vllm(step, memory) > 0


def sampler_host_bytes(step: StepConfig, memory: float) -> float:
    """CPU memory of a node that samplers take: their base models, if they are on no GPU; of vLLM
    that sleeps with LoRA its weights.
    """
    if step.vllm_in_turns:
        weights = step.element_bytes * step.shape.parameters
        kept = step.method == "lora"
        return kept * step.gpus_per_node / step.rollout_gpus * weights
    if not step.sampling_gpus or step.vllm or _base_is_on_gpu(step, memory):
        return 0.0
    return step.gpus_per_node * _base_model(step)


def _base_is_on_gpu(step: StepConfig, memory: float) -> bool:
    """Whether it takes less than a third: plugins/rl/sampler.py."""
    return 3 * step.element_bytes * step.shape.parameters < memory


def _base_model(step: StepConfig) -> float:
    """What a sampler merges an adapter into, as it is trained."""
    if step.adapter is None:
        return 0.0
    alone = replace(step, layout=Layout(), sampling_gpus=0, fp32_master=False, cpu_offload=False)
    return state_of(alone)["weights"]
