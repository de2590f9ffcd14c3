"""The files of rollouts in a run directory. Standard library only."""

# The folder of samplers: where they listen, their weights, and what became of them.
ROLLOUT = ".rollout"
# Inside it.
SAMPLER = "sampler_{}.json"
WEIGHTS = "weights_{}.safetensors"
WEIGHTS_FOLDER = "weights_{}"
SECRET = "secret"
NO_SAMPLER = "failed.json"
# What the samplers do now, and some answers of each step.
STATE = "rollout.json"
ANSWERS = "rollouts.jsonl"
