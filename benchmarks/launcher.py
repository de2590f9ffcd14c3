"""CPU seconds of the cookbook command: python benchmarks/launcher.py [--check]

The least of several rounds, in turns. With --check the exit status is 1 if a command takes longer
than it may on an idle core.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

COOKBOOK = str(Path(sys.prefix) / "bin" / "cookbook")
ROUNDS = 5
# Words of a command -> the seconds that it may take.
BOUNDS = {"--help": 0.5, "submit llama70b_lora --dry-run": 1.5, "estimate llama70b_lora": 1.5}


def cpu_s(words: str, env: dict[str, str]) -> float:
    """Return the CPU time, user and system, of one call."""
    argv = [COOKBOOK, *words.split()]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(argv)} failed")
    return used.ru_utime + used.ru_stime


def main() -> int:
    # As for a user, whose Python keeps the compiled code.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory(prefix="cookbook-bench-") as root:
        env["COOKBOOK_ROOT"] = root
        rounds = [{words: cpu_s(words, env) for words in BOUNDS} for _ in range(ROUNDS)]
    least = {words: min(each[words] for each in rounds) for words in BOUNDS}
    for words, bound in BOUNDS.items():
        print(f"cookbook {words:<32} {least[words]:6.3f} s of CPU time, at most {bound:g}")
    late = any(least[words] > bound for words, bound in BOUNDS.items())
    return 1 if late and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
