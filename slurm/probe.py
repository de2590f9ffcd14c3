"""Looks from inside an environment if ranks can run in it: python -m slurm.probe NEEDS GPUS PATH...

cookbook check and submit start it as a job would start its ranks. NEEDS: packages with commas
between them, and trainer for the kit's own. GPUS: yes or no. It prints a line for each fault,
"@ fault WORDS | REMEDY", and "@ found WORDS" at its end. Standard library only; it needs Python
3.9, so that an older one than the trainer's can say so.
"""

import importlib
import importlib.util
import os
import platform
import site
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

from runspec import versions


def faults(
    needs: Iterable[str], gpus_needed: bool, paths: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield (words, remedy) of each fault."""
    packages = set(needs)
    trainer = "trainer" in packages
    packages.discard("trainer")
    version = ".".join(map(str, sys.version_info[:3]))
    if trainer and not (3, 11) <= sys.version_info[:2] < (3, 14):
        yield (
            f"{sys.executable} is Python {version}, and the trainer needs 3.11 to 3.13",
            "set environment.python to another, or another image",
        )
    for path in paths:
        if not os.path.exists(path):
            yield f"{path} is not there inside", "add its folder to environment.binds"
    there = {name for name in packages if importlib.util.find_spec(name)}
    for name in sorted(packages - there):
        yield (
            f"{sys.executable} has no {name}",
            "install it there, or set environment.python to the interpreter that has it",
        )
    own = site.getusersitepackages()
    if own in sys.path and os.path.isdir(own):
        yield f"packages in {own} come before the environment's", "set PYTHONNOUSERSITE=1"
    if trainer and importlib.util.find_spec("transformers"):
        fault = versions.fault("transformers", metadata.version("transformers"))
        if fault:
            yield fault, "install another release there, or name another environment"
    if "torch" in there:
        try:
            torch = importlib.import_module("torch")
        except Exception as error:  # whatever the build lacks
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield f"torch cannot be imported: {first}", "its build has to match the image"
        else:
            if trainer and (fault := versions.fault("torch", torch.__version__)):
                yield fault, "another image or environment"
            if gpus_needed and not torch.cuda.is_available():
                built = torch.version.cuda or torch.version.hip
                yield (
                    f"torch {torch.__version__} sees no GPU",
                    "its driver and devices have to be inside: environment.options, or the "
                    "runtime's own GPU support"
                    if built
                    else "this torch is a build for CPUs: install one for the GPUs",
                )


def main() -> None:
    needs = filter(None, sys.argv[1].split(","))
    for message, remedy in faults(needs, sys.argv[2] == "yes", sys.argv[3:]):
        print(f"@ fault {message} | {remedy}")
    print(f"@ found Python {platform.python_version()}, {platform.machine()}")


if __name__ == "__main__":
    main()
