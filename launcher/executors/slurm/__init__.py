"""The only place that runs Slurm's commands; what the checks of a site and of a recipe ask."""

from launcher.executors.slurm.cluster import Node as Node
from launcher.executors.slurm.cluster import Nodes as Nodes
from launcher.executors.slurm.cluster import Partition as Partition
from launcher.executors.slurm.cluster import configuration as configuration
from launcher.executors.slurm.cluster import controllers as controllers
from launcher.executors.slurm.cluster import gpus_of as gpus_of
from launcher.executors.slurm.cluster import nodes as nodes
from launcher.executors.slurm.cluster import partitions as partitions
from launcher.executors.slurm.cluster import preempt_modes as preempt_modes
from launcher.executors.slurm.cluster import version as version
from launcher.executors.slurm.command import EXPORT as EXPORT
from launcher.executors.slurm.jobs import queue as queue
from launcher.executors.slurm.jobs import test_only as test_only
from launcher.executors.slurm.limits import keeps_accounting as keeps_accounting
from launcher.executors.slurm.limits import rights as rights
from launcher.executors.slurm.limits import rules as rules
from launcher.executors.slurm.reasons import why_pending as why_pending
from launcher.executors.slurm.reasons import with_meaning as with_meaning
from launcher.executors.slurm.step import Step as Step
from launcher.executors.slurm.step import run_on_nodes as run_on_nodes
