"""A cluster behind ssh, on this host: a real sshd with two factors."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher import paths

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
# PAM finds its rules by the name of the program, so a copy has its own; from OpenSSH 9.8 on by an
# option.
_NAME = f"cookbook-sshd-{os.getpid()}"
_RULES = Path("/etc/pam.d") / _NAME
_CODE = "123456"
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

    def authenticate(self) -> None:
        """Type the code of the day."""
        done = self.ssh("-Nf", "-o", "ControlMaster=auto", "cluster")
        assert done.returncode == 0, done.stderr

    def hang_up(self) -> None:
        self.ssh("-O", "exit", "cluster")

    @property
    def prompts(self) -> int:
        """How often somebody was asked for a code."""
        file = self.folder / "prompts"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    @property
    def calls(self) -> int:
        """How many commands ssh has started."""
        return (self.folder / "sshd.log").read_text().count("Starting session: command")

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
def cluster(folder: Path, variables: str = "") -> Iterator[Cluster]:
    """Start a login node. As root it asks for a second factor.

    Args:
        variables: NAME=VALUE of each login shell, with a space between two.
    """
    root = os.geteuid() == 0
    key, host_key = folder / "user", folder / "host"
    for each in (key, host_key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", each], check=True)
    sshd = folder / _NAME
    shutil.copy2(str(SSHD), sshd)
    code, shared = folder / "code.sh", folder / "shared"
    code.write_text(f'#!/bin/sh\necho asked >>{folder}/prompts\nread -r c; [ "$c" = {_CODE} ]\n')
    code.chmod(0o755)
    answer = folder / "answer.sh"
    answer.write_text(f"#!/bin/sh\necho {_CODE}\n")
    answer.chmod(0o755)
    two = (
        f"{_service()}UsePAM yes\nKbdInteractiveAuthentication yes\n"
        "AuthenticationMethods publickey,keyboard-interactive:pam\n"
    )
    port = _free_port()
    if root:
        permit = "".join(
            f"{kind} required pam_permit.so\n" for kind in ("auth", "account", "session")
        )
        _RULES.write_text(f"auth required pam_exec.so expose_authtok quiet {code}\n{permit}")
        Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / "sshd.conf"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nStrictModes no\n"
        f"AuthorizedKeysFile {key}.pub\nPidFile none\nLogLevel VERBOSE\nMaxSessions 50\n"
        f"PermitRootLogin yes\nPasswordAuthentication no\n{two if root else 'UsePAM no'}\n"
        f"SetEnv COOKBOOK_ROOT={shared} COOKBOOK_VENV={sys.prefix} {variables}\n"
    )
    with open(folder / "sshd.log", "wb") as log:
        argv = [sshd, "-D", "-e", "-f", config]
        process = subprocess.Popen(argv, stderr=log, start_new_session=True)
    _await(port)
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
        "SSH_ASKPASS": str(answer),
        "SSH_ASKPASS_REQUIRE": "force",
        "BROWSER": "true",
    }
    found = Cluster(folder, shared, env)
    try:
        yield found
    finally:
        found.hang_up()
        process.terminate()
        process.wait()
        if root:
            _RULES.unlink()


def _service() -> str:
    argv = [str(SSHD), "-T", "-o", f"PAMServiceName={_NAME}"]
    known = subprocess.run(argv, capture_output=True).returncode == 0
    return f"PAMServiceName {_NAME}\n" if known else ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _await(port: int) -> None:
    for _ in range(100):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"no sshd on port {port}")
