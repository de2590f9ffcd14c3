"""Requests that are over a limit of Slurm, and what the kit and Slurm say of each."""

# What is asked for; after "-" part of the finding; after "=" part of Slurm's answer, its meaning.
TEXT = """\
qos=job-gpus
  - 8 GPUs are asked for, and QoS job-gpus gives one job 4: the job would never start: lower
    --nodes or --gpus-per-node, or choose --qos account-many or free or job-cpus
  = QOSMaxGRESPerJob: more GPUs than your QoS allows per job, so it never starts: cancel it
qos=job-nodes
  - 2 nodes are asked for, and QoS job-nodes gives one job 1
  = QOSMaxNodePerJobLimit: more nodes than your QoS allows per job
qos=job-cpus cpus_per_gpu=4
  - 32 CPUs are asked for, and QoS job-cpus gives one job 16
  = QOSMaxCpuPerJobLimit: more CPUs than
qos=job-memory mem=200G
  - 409600 MiB of memory are asked for, and QoS job-memory gives one job 102400
  = QOSMaxMemoryPerJob: more memory than
qos=node-gpus
  - 4 GPUs are asked for, and QoS node-gpus gives a job 2 per node
  = QOSMaxGRESPerNode: more GPUs per node than your QoS allows per job
qos=user-gpus
  - QoS user-gpus gives one user 4
  = QOSMaxGRESPerUser: your QoS limits the GPUs of one user's jobs together: it waits until
    others end, and never starts if it alone asks for more than that
qos=account-gpus
  - QoS account-gpus gives one account 4
  = MaxGRESPerAccount: your QoS limits the GPUs of one account's jobs together
qos=all-gpus
  - QoS all-gpus gives all its jobs together 4
  = QOSGrpGRES: your QoS limits the GPUs of all its jobs together: it waits until others end,
    and never starts if it alone asks for more than that
qos=all-nodes
  - QoS all-nodes gives all its jobs together 1
  = QOSGrpNodeLimit: limits the nodes of all its jobs
qos=time time=01:00:00
  - a time limit of 01:00:00 is asked for, and QoS time gives 00:40:00: lower --time
  = QOSMaxWallDurationPerJobLimit: its time limit is longer than your QoS allows per job: lower
    --time
qos=strict
  - QoS strict gives one job 4
  = QOSMaxGRESPerJob: more GPUs than your QoS allows per job
gpus_per_node=8
  - 16 GPUs are asked for, and account physics gives all its jobs together 8: the job would
    never start: lower --nodes or --gpus-per-node, or choose --qos account-many
  = AssocGrpGRES: your account limits the GPUs of all its jobs together
account=chemistry
  - 8 GPUs are asked for, and your place in account chemistry gives one job 1
  = AssocMaxGRESPerJob: more GPUs than your account allows per job
account=spent
  - account spent has 0.0 GPU-hours left, and the run may take 4.0: ask
  = AssocGrpGRESMinutes: the GPUs x minutes that your account has for all its jobs are used up
partition=narrow
  - 2 nodes are asked for, and partition narrow gives a job 1: lower --nodes, or choose another
    --partition
  = Partition: the partition allows
partition=wide nodes=1
  - 1 nodes are asked for, and partition wide takes jobs on 2 or more: raise --nodes
  = Partition: the partition allows
partition=brief time=01:00:00
  - a time limit of 01:00:00 is asked for, and partition brief has 20:00: lower --time
  = Partition: the partition allows
partition=limited
  - 8 GPUs are asked for, and QoS of-partition gives one job 2
  = QOSMaxGRESPerJob: more GPUs than
partition=limited qos=job-gpus
  - 8 GPUs are asked for, and QoS of-partition gives one job 2
  = QOSMaxGRESPerJob: more GPUs than
partition=limited qos=over
  - 8 GPUs are asked for, and QoS over gives one job 4
  = QOSMaxGRESPerJob: more GPUs than
"""


def _case(text: str) -> tuple[dict[str, str | int], str, str, str]:
    asked, told, answer = text.split("\0")
    word, _, meaning = answer.removeprefix("= ").partition(":")
    pairs = (each.partition("=")[::2] for each in asked.split())
    resources = {key: int(value) if value.isdigit() else value for key, value in pairs}
    return resources, told.removeprefix("- "), word, meaning.strip()


_LINES = TEXT.replace("\n    ", " ").replace("\n  ", "\0").splitlines()
REFUSED = [_case(line) for line in _LINES]
