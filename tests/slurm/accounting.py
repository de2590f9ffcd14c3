"""A cluster with slurmdbd and its database: accounts, QoS, their limits, and ended jobs."""

import getpass
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.conftest import PROGRAMS, SlurmCluster, running_cluster
from tests.launcher.kit import until

ENFORCED = "AccountingStorageEnforce=associations,limits,qos\n"
# No network, little memory, no wait for the disk.
MARIADBD = (
    *("mariadbd", "--no-defaults", "--skip-networking", "--skip-grant-tables", "--skip-log-bin"),
    *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M"),
    *("--innodb-flush-log-at-trx-commit=2", f"--user={getpass.getuser()}"),
)
# The server's own tables: slurmdbd keeps a procedure in them.
TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
CONFIGURATION = """DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={munge}
PidFile={root}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm
"""
OF_CLUSTER = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={munge}
AccountingStorageTRES=gres/gpu,gres/gpu:h100
"""


@contextmanager
def accounting_cluster(name: str, *options: str) -> Iterator[SlurmCluster]:
    """A running cluster that enforces the limits of its accounts; options: of cluster.py up."""
    with running_cluster(name, *options) as cluster, ExitStack() as daemons:
        state, database = cluster.state, cluster.root / "database"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        values = {"port": port, "munge": state / "munge.socket", "root": cluster.root}
        values["user"] = getpass.getuser()
        own, conf = state / "slurmdbd.conf", state / "slurm.conf"
        own.touch(mode=0o600)
        plugins = [line for line in conf.read_text().splitlines() if line.startswith("PluginDir=")]
        own.write_text(CONFIGURATION.format(**values) + "\n".join(plugins))
        with conf.open("a") as file:
            file.write(OF_CLUSTER.format(**values) + ENFORCED)
        _make(database)
        place = [f"--datadir={database}", f"--socket={database}/socket"]
        _start(daemons, cluster, [*MARIADBD, *place])
        until((database / "socket").exists, 30)
        _start(daemons, cluster, ["slurmdbd", "-D"], MYSQL_UNIX_PORT=f"{database}/socket")
        until(lambda: not cluster.run(["sacctmgr", "show", "cluster"]).returncode, 30)
        # Without its cluster and an account for the user, the controller would refuse every job.
        user = f"add user {values['user']} Account=users DefaultAccount=users"
        added = [f"add cluster {name}", "add account users", user]
        cluster.run(["sacctmgr", "--immediate"], input="\n".join(added), check=True)
        restart_controller(cluster)
        yield cluster


def restart_controller(cluster: SlurmCluster) -> None:
    """Have the controller read a changed slurm.conf, all of it."""
    controller = psutil.Process(cluster.controller)
    controller.terminate()
    until(lambda: not controller.is_running() or controller.status() == "zombie", 20)
    cluster.start_dead_daemons()


def _make(database: Path) -> None:
    """Make the files of a database that only this user can reach."""
    database.mkdir(mode=0o700)
    tables = f"create database mysql;\nuse mysql;\n{TABLES.read_text()}"
    argv = [*MARIADBD, f"--datadir={database}", "--bootstrap"]
    env = {**os.environ, "PATH": PROGRAMS}
    subprocess.run(argv, input=tables, env=env, text=True, capture_output=True, check=True)


def _start(daemons: ExitStack, cluster: SlurmCluster, argv: Sequence[str], **more: str) -> None:
    env = {**cluster.env, "PATH": f"{cluster.env['PATH']}:{PROGRAMS}", **more}
    log = daemons.enter_context((cluster.root / f"{argv[0]}.log").open("w"))
    process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
    daemons.callback(process.wait)
    daemons.callback(process.kill)
