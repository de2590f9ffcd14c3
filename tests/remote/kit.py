"""A cluster behind ssh, on this host: a real sshd."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launcher import paths
from tests.launcher.kit import until

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
HOST = f"cluster:{paths.REPO_ROOT}"


@dataclass
class Cluster:
    """What a laptop sees of it, and what its login node has noted."""

    folder: Path
    root: Path
    env: dict[str, str] = field(default_factory=dict)

    def ssh(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = ["ssh", "-F", str(self.folder / "config"), *arguments]
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=self.env, timeout=60
        )

    def hang_up(self) -> None:
        self.ssh("-O", "exit", "cluster")

    @property
    def authentications(self) -> int:
        """How often somebody has logged in."""
        return (self.folder / "sshd.log").read_text().count("Accepted publickey")

    def start(self, *arguments: str, cwd: Path) -> "subprocess.Popen[bytes]":
        """Start the laptop's command."""
        return subprocess.Popen(
            [sys.executable, "-m", "launcher", "--host", HOST, *arguments],
            cwd=cwd,
            env={**self.env, "PYTHONPATH": str(paths.REPO_ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def cookbook(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, cwd=cwd)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(
            arguments, process.returncode, out.decode(), err.decode()
        )


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a login node."""
    key, host_key = folder / "user", folder / "host"
    for each in (key, host_key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", each], check=True)
    shared = folder / "shared"
    port = _free_port()
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / "sshd.conf"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nStrictModes no\n"
        f"AuthorizedKeysFile {key}.pub\nPidFile none\nLogLevel VERBOSE\nMaxSessions 50\n"
        f"PermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\n"
        f"SetEnv COOKBOOK_ROOT={shared} COOKBOOK_VENV={sys.prefix}\n"
    )
    with open(folder / "sshd.log", "wb") as log:
        argv = [str(SSHD), "-D", "-e", "-f", config]
        process = subprocess.Popen(argv, stderr=log, start_new_session=True)
    until(lambda: "Server listening" in (folder / "sshd.log").read_text(), 30)
    (folder / "config").write_text(
        f"Host cluster\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {key}\n"
        "  IdentitiesOnly yes\n  UserKnownHostsFile /dev/null\n  StrictHostKeyChecking no\n"
        f"  LogLevel ERROR\n  ControlPath {folder}/cm\n"
    )
    home = folder / "laptop"
    home.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("COOKBOOK_")}
    env = {
        **kept,
        "HOME": str(home),
        "COOKBOOK_SSH": f"ssh -F {folder}/config",
        "BROWSER": "true",
    }
    found = Cluster(folder, shared, env)
    try:
        yield found
    finally:
        found.hang_up()
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
