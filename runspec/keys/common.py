"""The keys of every recipe, and those of `entry: script:PATH`, a training script of one's own.

The launcher reads them, the trainer never sees them.
"""

from dataclasses import dataclass, replace

from runspec.keys.environment import ENVIRONMENT
from runspec.keys.key import Key, keys_of, option, table


@dataclass(frozen=True)
class ResourceKeys:
    """What one run asks of Slurm; None leaves the choice to the cluster."""

    nodes: int = option("positive", "Number of nodes. Option: --nodes.", 1)
    gpus_per_node: int = option("positive", "GPUs per node, with one rank each.", 1)
    gpu_type: str | None = option("name", "Type of the GPUs, as in sinfo -o %G.")
    cpus_per_gpu: int | None = option(
        "positive",
        "CPUs per GPU. Default: a GPU's share of its node's CPUs, as sinfo reports them.",
    )
    mem: str | None = option(
        "memory",
        "CPU memory per node: 900G, or 0 for all of it. Default: 0 if exclusive, else Slurm's.",
    )
    time: str | None = option("time", "Time limit: 04:00:00, 90 (minutes), 2-00:00:00.")
    partition: str | None = option("word", "Partition, or several with commas.")
    account: str | None = option("name", "Slurm account.")
    qos: str | None = option("name", "Quality of service.")
    constraint: str | None = option("word", "Node features, such as h100&ib.")
    reservation: str | None = option("name", "Reservation.")
    exclude: str | None = option("word", "Nodes to avoid, such as gpu-[07-09].")
    mail_user: str | None = option("word", "Address to which Slurm sends mail.")
    mail_type: str | None = option("word", "Events of which it sends mail: BEGIN,END,FAIL.")
    exclusive: bool = option("flag", "Do not share the nodes with other jobs.", False)
    rollout: int = option(
        "count",
        "Additional nodes in the same job that generate the answers of entry: grpo, with a sampler "
        "on each GPU. 0: the GPUs that train generate, in turns.",
        0,
    )


_KEYS = (
    Key("description", "text", "One line for the list of recipes."),
    Key(
        "entry",
        "text",
        "What to run: a method of the kit's trainer, such as sft or dpo; torchtune:NAME, a "
        "torchtune recipe; script:PATH, your own script; command, your own shell lines; or another "
        "trainer such as trl:CONFIG (docs/engines.md). Paths are relative to the recipe's file.",
        "sft",
    ),
    Key(
        "output_dir",
        "text",
        "${output_dir} is the run's directory.",
        unused="each run has its own directory in COOKBOOK_ROOT/runs; --name sets part of its name",
    ),
    Key(
        "hang_timeout_s",
        "count",
        "Seconds without a training step after which the ranks count as hung: their stacks are "
        "written and the attempt is restarted. At least the time of five steps; 0 disables it.",
        600,
    ),
    Key(
        "max_retries",
        "count",
        "Maximum number of consecutive failed attempts to retry, if nothing new is saved between "
        "them. Default: 3 if the entry resumes from checkpoints, else 0.",
    ),
    Key(
        "node_check",
        "flag",
        "Check every node before training: GPUs and GPU errors, the disk, a matrix product "
        "and an all-reduce. A node that fails is excluded. Use false if GPUs are shared.",
        True,
    ),
    Key(
        "tracking",
        "tracker",
        "Where cookbook watch writes the run at its end: mlflow, for a store beside the runs, or "
        "the address of an MLflow server. cookbook track writes any run.",
    ),
    Key(
        "share",
        "private | group",
        "Who may read the run's directory, checkpoints and export: only you, or also your group.",
        "private",
    ),
    Key("env", "open block", "Environment variables of the job. No secrets."),
    Key(
        "environment",
        "named block",
        "What the ranks run in: the name of a file in configs/environments, or a block of its "
        "keys. Default: the site's default_environment, else the kit's virtual environment.",
    ),
    *(replace(key, name=f"environment.{key.name}") for key in ENVIRONMENT.values()),
    Key(
        "secrets",
        "any",
        "Environment variables that the job reads from files that only you may read: a list of "
        "names (files in ~/.config/slurm-cookbook/secrets), or names with paths.",
    ),
    Key(
        "resources",
        "block",
        "Resources that the job requests from Slurm; the site's file sets defaults.",
    ),
    *(replace(key, name=f"resources.{key.name}") for key in keys_of(ResourceKeys).values()),
    Key("hub", "block", "What cookbook download fetches from the Hugging Face Hub."),
    Key("hub.model", "repository", "org/name or org/name@revision, for checkpoint_dir."),
    Key("hub.teacher", "repository", "The same for the folder of a teacher."),
    Key("hub.dataset", "repository", "A dataset, for nodes without internet."),
    Key("prepare", "block", "A step on the login node, before the first run."),
    Key("prepare.module", "text", "Module of the kit, such as trainer.demo."),
    Key("prepare.args", "list", "Its arguments."),
    Key(
        "prepare.creates", "text", "A file that it makes; if the file exists, the step is skipped."
    ),
)

# Where and how a run is started may change at each resume; what it trains may not.
COMMON = {key.name: replace(key, may_change=key.name != "entry") for key in _KEYS}

SCRIPT = table(
    Key(
        "code_root",
        "text",
        "Folder to copy into the run, relative to the recipe's file. Default: the script's folder.",
    ),
    Key("args", "list", "Arguments of the script, one item each."),
    Key(
        "parameters",
        "open block",
        "Parameters for the script, in the YAML file $COOKBOOK_PARAMETERS.",
    ),
)

COMMAND = table(
    Key(
        "command",
        "any",
        "Shell lines that each node runs once, in the copy of code_root: torchrun, accelerate or "
        "any other launcher.",
    ),
    Key(
        "stop_signal",
        "TERM | INT | USR1 | USR2",
        "Signal that asks the command to save and stop before the time limit. Default: none; the "
        "file $COOKBOOK_STOP_FILE appears.",
    ),
)
