"""What imports what: the wall between trainer and launcher, and what a rank does not import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import startup
from tests.trainer.runs import ROOT

FILES = sorted((ROOT / "trainer").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_walls(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path)}
    assert "launcher" not in tops
    if path.parent.name != "torchtune":
        assert not tops & {"torchtune", "torchao"}, "only trainer/models/torchtune imports these"


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )


def test_compat_imports_everything_it_names_and_says_nothing() -> None:
    done = run(
        "from trainer.models.torchtune import compat; "
        "[getattr(compat, name) for name in dir(compat)]"
    )
    assert done.stdout == done.stderr == ""


def test_checking_a_config_needs_no_torch() -> None:
    code = "import sys, trainer.config; print([m for m in sys.modules if m.startswith('torch')])"
    assert run(code).stdout == "[]\n"


def test_a_rank_imports_little_more_than_torch(tmp_path: Path, model_folder: Path) -> None:
    """Files are counted exactly; the time is about 1.1 times torch's."""
    path = startup.write_run(tmp_path / "run", model_folder)
    found = startup.measure(path, runs=1)
    if found["seconds"] > startup.LIMIT:
        # One run may have met a slow phase of the host.
        found = startup.measure(path, runs=5)
    print("\n".join(found["lines"]))
    assert found["files"] <= startup.LIMIT
    assert found["seconds"] <= startup.LIMIT
    heavy = {"datasets", "pandas", "transformers", "omegaconf", "jinja2", "tensorboard"}
    assert not heavy & set(found["modules"])
    # Of these only a deferred module may be there, and nothing below it.
    below = ("torchao.", "sympy.", "torch._dynamo.", "torch._inductor.")
    allowed = {"torch._dynamo.config", "torchao.dtypes", "torchao.dtypes.nf4tensor"}
    assert not [m for m in found["modules"] if m.startswith(below) and m not in allowed]


def test_everything_is_imported_at_once_if_a_site_says_so() -> None:
    code = """
import os, sys
os.environ["COOKBOOK_IMPORT_ALL"] = "1"
import trainer, torch.distributed.tensor
assert "sympy.core" in sys.modules and not any("Deferr" in str(f) for f in sys.meta_path)
"""
    assert run(code).returncode == 0


def test_a_deferred_package_is_whole_when_it_is_used() -> None:
    """Whatever is asked for first, the real thing is found, once, and stand-ins are replaced."""
    code = """
import trainer, torch
from torchtune.modules import TransformerDecoder
from torch.distributed.tensor._decompositions import GuardOnDataDependentSymNode as before
import sys, torch.fx.experimental.symbolic_shapes as symbols
assert "sympy.core" not in sys.modules and symbols.guard_or_false(True) is True
import torch._dynamo.convert_frame
assert torch._dynamo.convert_frame is sys.modules["torch._dynamo.convert_frame"]
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
from torch.distributed.tensor import _decompositions as users
assert users.GuardOnDataDependentSymNode is symbols.GuardOnDataDependentSymNode is not before
assert issubclass(torch.fx.experimental.symbolic_shapes.ShapeEnv, object)
import torchtune.modules as modules
assert modules.TransformerDecoder is TransformerDecoder and modules.VisionTransformer
assert set(modules.__all__) <= set(dir(modules))
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
assert isinstance(to_nf4(torch.randn(128, 128)).clone(), NF4Tensor)
import torchtune
assert torchtune.datasets.instruct_dataset and torchtune.__version__
"""
    assert run(code).returncode == 0


def test_a_part_of_a_deferred_package_runs_once_if_it_is_asked_for_first() -> None:
    """A second run would make its classes anew, and lose the names of its own parts."""
    code = """
import trainer, torch
import torchao.float8
assert torchao.float8.inference.Float8MMConfig is torchao.float8.Float8MMConfig
from transformers import LlamaForCausalLM
"""
    assert run(code).returncode == 0
