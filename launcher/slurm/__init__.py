"""The only place that runs Slurm's commands; what the checks of a site and of a recipe ask."""

from launcher.slurm.cluster import Nodes as Nodes
from launcher.slurm.cluster import Partition as Partition
from launcher.slurm.cluster import configuration as configuration
from launcher.slurm.cluster import gpus_of as gpus_of
from launcher.slurm.cluster import partitions as partitions
from launcher.slurm.cluster import version as version
from launcher.slurm.command import EXPORT as EXPORT
from launcher.slurm.jobs import queue as queue
from launcher.slurm.jobs import test_only as test_only
from launcher.slurm.limits import keeps_accounting as keeps_accounting
from launcher.slurm.limits import rights as rights
from launcher.slurm.limits import rules as rules
from launcher.slurm.reasons import why_pending as why_pending
from launcher.slurm.reasons import with_meaning as with_meaning
from launcher.slurm.step import Step as Step
from launcher.slurm.step import run_on_nodes as run_on_nodes
