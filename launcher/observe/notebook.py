"""Starting Jupyter on 127.0.0.1 or on a node, with a token of its own."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from launcher import paths
from launcher.errors import PreflightFault
from launcher.observe import servers

# Jupyter's own default port, and the next ones if it is taken.
PORTS = range(8888, 8988)
_PROGRAMS = ("jupyter-lab", "jupyter-notebook")


def program(given: str | None) -> Path:
    """Return Jupyter: the one that is named, else that of the kit's environment or of the shell.

    Raises:
        PreflightFault: there is none.
    """
    own = paths.venv_root() / "bin"
    for name in [given] if given else _PROGRAMS:
        for where in (str(own), None):
            if found := shutil.which(str(Path(name).expanduser()), path=where):
                return Path(found).absolute()
    missing = f"there is no program {given}" if given else f"there is no Jupyter in {own} or PATH"
    raise PreflightFault(
        f"{missing}: install it with: {own / 'pip'} install jupyterlab, or name that of another "
        "environment with --jupyter PATH"
    )


def serve(
    jupyter: Path, folder: Path, port: int, say: Callable[[str], None], jump: str | None
) -> int:
    """Serve a folder until interrupted; return Jupyter's exit status."""
    servers.end_with_signals()
    token = secrets.token_hex(24)
    path = f"/?token={token}"
    argv = [
        str(jupyter),
        "--no-browser",
        "--log-level=WARN",
        f"--ip={servers.address()}",
        f"--port={port}",
    ]
    argv += ["--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    argv += ["--allow-root"] * (os.geteuid() == 0)
    with tempfile.TemporaryDirectory(prefix="cookbook-jupyter-") as own:
        # The token is in no argument, which others on the node can read.
        env = {**os.environ, "JUPYTER_TOKEN": token, "JUPYTER_RUNTIME_DIR": own}
        if servers.LISTENING not in os.environ:
            say(f"on your own machine:  {servers.tunnel(port, jump)}")
            say(f"then open:            http://127.0.0.1:{port}{path}   (Ctrl-C here ends it)")
        return servers.run(argv, env, port, path)
