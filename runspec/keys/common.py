"""The keys of every recipe, and those of `entry: script:PATH`, a training script of one's own.

The launcher reads them, the trainer never sees them.
"""

from dataclasses import replace

from runspec.keys.key import Key

_KEYS = (
    Key("description", "text", None, "One line for the list of recipes."),
    Key(
        "entry",
        "text",
        "sft",
        "What is started: sft, the kit's trainer; torchtune:NAME, a recipe of torchtune's; or "
        "script:PATH, your own script. PATH counts from the recipe's file.",
    ),
    Key(
        "output_dir",
        "text",
        None,
        "${output_dir} is the run's directory.",
        unused="each run has its own directory in COOKBOOK_ROOT/runs; --name sets part of its name",
    ),
    Key("timeout", "time", None, "Time limit of one attempt. Default: the job's."),
    Key(
        "hang_timeout_s",
        "count",
        600,
        "Seconds without a training step after which the ranks count as hung: their stacks are "
        "written and the attempt is started again. Never less than five steps; 0 waits for ever.",
    ),
    Key(
        "max_retries",
        "count",
        None,
        "Failed attempts in a row, with no new checkpoint between them, that are retried. "
        "Default: 3 if the entry resumes from checkpoints, else 0.",
    ),
    Key(
        "share",
        "private | group",
        "private",
        "Who may read the run's directory, checkpoints and export: you, or your group too.",
    ),
    Key("env", "open block", None, "Environment variables of the job. No secrets."),
    Key(
        "secrets",
        "any",
        None,
        "Environment variables that the job reads from files which only you may read: a list of "
        "names (files in ~/.config/slurm-cookbook/secrets), or names with paths.",
    ),
    Key("resources", "block", None, "What the job asks of Slurm; the site's file has defaults."),
    Key("resources.nodes", "positive", 1, "Number of nodes. Option: --nodes."),
    Key(
        "resources.spare_nodes",
        "count",
        0,
        "Nodes that the job gets in addition: one takes the place of a node that fails.",
    ),
    Key("resources.gpus_per_node", "positive", 1, "GPUs on each node; one rank runs on each."),
    Key("resources.gpu_type", "name", None, "Type of the GPUs, as in sinfo -o %G."),
    Key(
        "resources.cpus_per_gpu",
        "positive",
        None,
        "CPUs per GPU. Default: a GPU's share of its node's CPUs, as sinfo reports them.",
    ),
    Key(
        "resources.mem",
        "memory",
        None,
        "CPU memory per node: 900G, or 0 for all of it. Default: 0 if exclusive, else Slurm's.",
    ),
    Key("resources.time", "time", None, "Time limit: 04:00:00, 90 (minutes), 2-00:00:00."),
    Key("resources.partition", "partition", None, "Partition, or several with commas."),
    Key("resources.account", "name", None, "Slurm account."),
    Key("resources.qos", "name", None, "Quality of service."),
    Key("resources.constraint", "features", None, "Node features, such as h100&ib."),
    Key("resources.reservation", "name", None, "Reservation."),
    Key("resources.exclude", "nodes", None, "Nodes to avoid, such as gpu-[07-09]."),
    Key("resources.exclusive", "flag", False, "Share the nodes with no other job."),
    Key("hub", "block", None, "What cookbook download fetches from the Hugging Face hub."),
    Key("hub.model", "repository", None, "org/name or org/name@revision, for checkpoint_dir."),
    Key("hub.dataset", "repository", None, "A dataset, for nodes without internet."),
    Key("prepare", "block", None, "A step on the login node, before the first run."),
    Key("prepare.module", "text", None, "Module of the trainer, such as trainer.demo."),
    Key("prepare.args", "list", None, "Its arguments."),
    Key("prepare.creates", "text", None, "A file that it makes; once it exists, no step is run."),
)

# Where and how a run is started may change at each resume; what it trains may not.
COMMON = {key.name: replace(key, may_change=key.name != "entry") for key in _KEYS}

_SCRIPT = (
    Key(
        "code_root",
        "text",
        None,
        "Folder that is copied into the run; it counts from the recipe's file. Default: the "
        "script's folder.",
    ),
    Key("args", "list", None, "Arguments of the script, one item each."),
    Key("parameters", "open block", None, "For the script: the YAML file $COOKBOOK_PARAMETERS."),
)
SCRIPT = {key.name: key for key in _SCRIPT}
