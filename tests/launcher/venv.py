"""A virtual environment whose trainer answers from forks: python -I -S venv.py SESSION ...

The launcher asks the trainer about configs in a process of its own, `python -m trainer.check` for
example, most of whose time is that of imports. The environment is the tests' own but for
bin/python, which forks such a process (tests/forked.py), and starts all others as they are.
"""

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Hugging Face's libraries and torch read these when they are imported.
READ_AT_IMPORT = ("HF_HOME", "HF_HUB_", "HF_ENDPOINT", "HF_DATASETS_", "TRANSFORMERS_", "TORCH_")


def make(folder: Path, session: int) -> Path:
    """Make the environment, for a session of tests/forked.py."""
    real = Path(sys.prefix)
    (folder / "bin").mkdir(parents=True)
    for path in real.iterdir():
        if path.name != "bin":
            (folder / path.name).symlink_to(path)
    for path in (real / "bin").iterdir():
        if path.name != "python":
            (folder / "bin" / path.name).symlink_to(path)
    python, own = shlex.quote(str(real / "bin" / "python")), shlex.quote(__file__)
    modules = ("trainer.check", "trainer.describe", "plugins.estimate.trace")
    asks = "|".join(f'"-m {each} {ROOT}"' for each in modules)
    program = folder / "bin" / "python"
    program.write_text(
        f'#!/bin/sh\ncase "$1 $2 $PYTHONPATH" in\n{asks})\n'
        f'  exec {python} -I -S {own} {session} "$@" ;;\nesac\nexec {python} "$@"\n'
    )
    program.chmod(0o755)
    return folder


def main(session: str, *command: str) -> None:
    """Run `python command`, in a fork if its imports would be the same in this environment."""
    if any(name.startswith(READ_AT_IMPORT) for name in os.environ):
        os.execv(sys.executable, [sys.executable, *command])
    sys.path.insert(0, str(ROOT))
    from tests import forked

    forked.SESSION = int(session)
    process = forked.Fork(forked.TRAINER, command[1], command[2:], os.environ, 1, 2)
    status = process.wait()
    if status is not None and status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
