"""Why a job waits or is refused: Slurm's reasons (squeue's manual page) in plain English."""

import re

# A pattern and its meaning per line; the first pattern that matches counts.
_REASONS = """
Priority = other jobs come first
Resources = the nodes that it needs are busy
BeginTime = Slurm starts a requeued job after about two minutes
Dependency = it waits for another job; DependencyNeverSatisfied never ends: cancel it
ReqNodeNotAvail|Nodes_required_for_job = nodes that it needs are down, drained or reserved
Reservation = its reservation has not begun, or maintenance is near: a shorter --time may fit
PartitionTimeLimit = it asks for more time than the partition allows: lower --time
PartitionNodeLimit = it asks for more, or fewer, nodes than the partition allows: change --nodes
PartitionDown|PartitionInactive = the partition starts no jobs now
BadConstraints = no node has what it asks for: check resources.constraint and the GPU type
PartitionConfig = it asks for more than the partition allows, or may not use the partition
AccountNotAllowed|InvalidAccount|Job's account = the account may not use this partition: --account
InvalidQOS|QOSNotAllowed|Job's QOS = the QoS may not be used here: choose another --qos
QOSTimeLimit = the time that your QoS allows is used up
QOSUsageThreshold|QOSResourceLimit = the limit of your QoS is reached
Licenses = a licence that it needs is in use
JobHeldUser|JobHeldAdmin = it is held
launch failed|JobLaunchFailure = a node could not start it, so Slurm holds it
Cleaning|Prolog = the nodes are being prepared
"""

# Limits of accounting have names made of parts, such as QOSMaxGRESPerUser, MaxGRESPerAccount (a
# QoS's too) and AssocGrpCPURunMinutesLimit.
_LIMIT = re.compile(
    r"(?P<owner>QOS|Assoc|)(?P<kind>Grp|Max|Min)"
    r"(?P<what>SubmitJobs?|Jobs|WallDuration|Wall|GRES|CPU|Cpu|Memory|Mem|Node|[A-Z][A-Za-z]*?)"
    r"(?P<minutes>(?:Run)?Minutes)?(?:Per(?P<per>Job|Node|User|Account))?(?:Limit|NotSatisfied)?\Z"
)
_LIMITED = {"GRES": "GPUs", "CPU": "CPUs", "Cpu": "CPUs", "Node": "nodes", "Mem": "memory"}


def why_pending(reason: str) -> str:
    """Return Slurm's reason with what it means; an unknown reason stands alone."""
    if limit := _LIMIT.match(reason):
        return f"{reason}: {_limit_meaning(**limit.groupdict())}"
    known = (line.split(" = ") for line in _REASONS.strip().splitlines())
    meaning = next((meaning for pattern, meaning in known if re.match(pattern, reason)), None)
    return f"{reason}: {meaning}" if meaning else reason


def with_meaning(reason: str) -> str:
    """Return Slurm's words with the meaning of the limit that they name, if they name one."""
    matches = map(_LIMIT.match, re.findall(r"\b(?:QOS|Assoc|Grp|Max|Min)[A-Z]\w+", reason))
    limit = next(filter(None, matches), None)
    return f"{reason} ({_limit_meaning(**limit.groupdict())})" if limit else reason


def _limit_meaning(owner: str, kind: str, what: str, minutes: str | None, per: str | None) -> str:
    whose, option = ("account", "--account") if owner == "Assoc" else ("QoS", "--qos")
    things = _LIMITED.get(what, what.lower())
    never = f"so it never starts: cancel it and ask for less, or choose another {option}"
    shared = "it waits until others end, and never starts if it alone asks for more than that"
    if what.startswith("Submit"):
        return f"your {whose} has as many jobs in the queue as it may: wait until one ends"
    if what == "Jobs":
        return f"your {whose} already runs the maximum number of jobs: it waits until one ends"
    if what == "WallDuration":
        meaning = f"its time limit is longer than your {whose} allows per job"
        return f"{meaning}: lower --time, or choose another {option}"
    if what == "Wall":
        return f"the time that your {whose} has for all its jobs is used up"
    if kind == "Min":
        return f"it asks for fewer {things} than your {whose} requires, {never}"
    if kind == "Grp" and minutes:
        gone = "reserved by running jobs" if minutes.startswith("Run") else "used up"
        return f"the {things} x minutes that your {whose} has for all its jobs are {gone}"
    if kind == "Grp":
        return f"your {whose} limits the {things} of all its jobs together: {shared}"
    if per in ("User", "Account"):
        return f"your {whose} limits the {things} of one {per.lower()}'s jobs together: {shared}"
    asked = f"{things} x minutes" if minutes else f"{things} per node" if per == "Node" else things
    return f"it asks for more {asked} than your {whose} allows per job, {never}"
