"""The keys of every recipe, and those of `entry: script:PATH`, a training script of one's own.

The launcher reads them, the trainer never sees them.
"""

from dataclasses import replace

from runspec.keys.key import Key

_KEYS = (
    Key("description", "text", "One line for the list of recipes."),
    Key(
        "entry",
        "text",
        "What is started: sft, the kit's trainer; torchtune:NAME, a recipe of torchtune's; or "
        "script:PATH, your own script. PATH counts from the recipe's file.",
        "sft",
    ),
    Key(
        "output_dir",
        "text",
        "${output_dir} is the run's directory.",
        unused="each run has its own directory in COOKBOOK_ROOT/runs; --name sets part of its name",
    ),
    Key("timeout", "time", "Time limit of one attempt. Default: the job's."),
    Key(
        "hang_timeout_s",
        "count",
        "Seconds without a training step after which the ranks count as hung: their stacks are "
        "written and the attempt is started again. At least five steps of time; 0 turns it off.",
        600,
    ),
    Key(
        "max_retries",
        "count",
        "Failed attempts in a row, with nothing new saved between them, that are retried. "
        "Default: 3 if the entry resumes from checkpoints, else 0.",
    ),
    Key(
        "max_gpu_hours",
        "number",
        "GPU-hours that all attempts of the run may use together, lost work included. When they "
        "are used up, the ranks save a checkpoint and the run ends. Default: no limit.",
    ),
    Key(
        "node_check",
        "flag",
        "Check every node before training: its GPUs, errors of theirs, the disk, a matrix product "
        "and an all-reduce. A node that fails is left out. False where GPUs are shared.",
        True,
    ),
    Key("notify", "block", "Who is told of a run's events; the site's file may have the same."),
    Key("notify.events", "events", "What is told. Default: all three."),
    Key("notify.mail", "address", "Slurm sends mail there."),
    Key(
        "notify.webhook",
        "text",
        "The file with a webhook's address, which only you may read: its path, or its name in "
        "~/.config/slurm-cookbook/secrets.",
    ),
    Key("notify.form", "json | slack | teams", "What the webhook takes.", "json"),
    Key(
        "tracking",
        "tracker",
        "Where the end of cookbook watch writes the run: mlflow, for a store beside the runs, the "
        "address of an MLflow server, or wandb, wandb:PROJECT, wandb:ENTITY/PROJECT. cookbook "
        "track writes any run.",
    ),
    Key(
        "share",
        "private | group",
        "Who may read the run's directory, checkpoints and export: you, or your group too.",
        "private",
    ),
    Key("env", "open block", "Environment variables of the job. No secrets."),
    Key(
        "secrets",
        "any",
        "Environment variables that the job reads from files which only you may read: a list of "
        "names (files in ~/.config/slurm-cookbook/secrets), or names with paths.",
    ),
    Key("resources", "block", "What the job asks of Slurm; the site's file has defaults."),
    Key("resources.nodes", "positive", "Number of nodes. Option: --nodes.", 1),
    Key(
        "resources.spare_nodes",
        "count",
        "Nodes that the job gets in addition: one takes the place of a node that fails.",
        0,
    ),
    Key("resources.gpus_per_node", "positive", "GPUs on each node; one rank runs on each.", 1),
    Key("resources.gpu_type", "name", "Type of the GPUs, as in sinfo -o %G."),
    Key(
        "resources.cpus_per_gpu",
        "positive",
        "CPUs per GPU. Default: a GPU's share of its node's CPUs, as sinfo reports them.",
    ),
    Key(
        "resources.mem",
        "memory",
        "CPU memory per node: 900G, or 0 for all of it. Default: 0 if exclusive, else Slurm's.",
    ),
    Key("resources.time", "time", "Time limit: 04:00:00, 90 (minutes), 2-00:00:00."),
    Key("resources.partition", "partition", "Partition, or several with commas."),
    Key("resources.account", "name", "Slurm account."),
    Key("resources.qos", "name", "Quality of service."),
    Key("resources.constraint", "features", "Node features, such as h100&ib."),
    Key("resources.reservation", "name", "Reservation."),
    Key("resources.exclude", "nodes", "Nodes to avoid, such as gpu-[07-09]."),
    Key("resources.exclusive", "flag", "Share the nodes with no other job.", False),
    Key("hub", "block", "What cookbook download fetches from the Hugging Face hub."),
    Key("hub.model", "repository", "org/name or org/name@revision, for checkpoint_dir."),
    Key("hub.dataset", "repository", "A dataset, for nodes without internet."),
    Key("prepare", "block", "A step on the login node, before the first run."),
    Key("prepare.module", "text", "Module of the trainer, such as trainer.demo."),
    Key("prepare.args", "list", "Its arguments."),
    Key("prepare.creates", "text", "A file that it makes; once it exists, no step is run."),
)

# Where and how a run is started may change at each resume; what it trains may not.
COMMON = {key.name: replace(key, may_change=key.name != "entry") for key in _KEYS}

_SCRIPT = (
    Key(
        "code_root",
        "text",
        "Folder that is copied into the run; it counts from the recipe's file. Default: the "
        "script's folder.",
    ),
    Key("args", "list", "Arguments of the script, one item each."),
    Key(
        "redact_output",
        "flag",
        "Keep the values of secrets, and what looks like a token, out of the script's logs.",
        False,
    ),
    Key("parameters", "open block", "For the script: the YAML file $COOKBOOK_PARAMETERS."),
)
SCRIPT = {key.name: key for key in _SCRIPT}
