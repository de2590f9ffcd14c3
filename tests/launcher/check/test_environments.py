"""Environments: records, their job scripts, what is found before the queue, and real runs."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import paths
from launcher.check import Context, findings, inside
from launcher.errors import PreflightFault, RecipeFault, RunFault
from launcher.recipe import load as recipes
from launcher.recipe.environment import Environment
from launcher.recipe.model import Recipe
from launcher.run import built
from launcher.run.directory import Run
from launcher.site import Site, complete
from launcher.slurm import executors, render
from runspec import files
from slurm import probe
from tests.faults import containers

RUN = Path("/shared/runs/20260102-030405-demo-0a1b")


def loaded(block: str, *more: str) -> Recipe:
    return recipes.load("demo", [f"+environment={block}", *more])


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        ("{dependencies: [einops]}", ['exec "$ENV_PYTHON" -P -m torch.distributed.run']),
        ("{setup: [conda activate llm], python: python}", ["conda activate", "find_python python"]),
        ("{modules: [cuda/12.8]}", ["load_module cuda/12.8", "exec python -P"]),
        ("{prefix: [numactl, --localalloc]}", ["exec numactl --localalloc python -P"]),
        ("{srun: [--mpi=none]}", ["--export=ALL \\\n  --mpi=none \\\n  bash -c"]),
        ("{variables: {A: 1 2}}", ["export A='1 2'"]),
        *[
            (
                f"{{kind: {kind}, image: /i, binds: ['/data:/d:ro'], options: [--o=1]}}",
                [f"enter_container {kind} /i /data:/d:ro --o=1", 'exec "${INSIDE[@]}" "$ENV_PY'],
            )
            for kind in ("pyxis", "apptainer")
        ],
    ],
)
def test_a_record_becomes_lines_of_the_job_script(block, wanted):
    text = render.job_script(loaded(block), Site(), RUN, "demo")
    assert [line for line in wanted if line not in text] == []
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_module_that_is_out_of_sight_for_a_moment_is_waited_for():
    # It is there once the first try has failed.
    lines = [
        f"source {paths.REPO_ROOT}/slurm/environment.sh",
        "module() { export LOADEDMODULES=$there; }",
        "sleep() { there=own; }",
        *loaded("{modules: [own]}").environment.lines,
    ]
    script = "\n".join([*lines, "echo $?"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == "0\n" and done.stderr.count("the module own was not loaded") == 1


def test_serving_runs_on_the_host_and_its_engine_in_the_environment():
    given = ["endpoint=e", "endpoint_dir=/e", "model=/m", "key_file=/k"]
    block = "+environment={kind: apptainer, image: i, python: py}"
    asked = recipes.load(str(paths.REPO_ROOT / "configs/serve/default.yaml"), [*given, block])
    text = render.job_script(asked, Site(), RUN, "serve")
    assert 'exec "$VENV/bin/python" -P -m torch.distributed.run' in text
    assert '"$VENV/bin/python" -m plugins.serve.server' in text
    assert 'printf \'%s\\n\' "${INSIDE[@]}" "$ENV_PYTHON")' in text


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("{kind: apptainer}", "environment.image is missing"),
        ("{image: /i}", "environment.image has no meaning for kind: venv"),
        ("{kind: apptainer, image: i, binds: [data]}", "'data' is not /PATH"),
        ("{kind: docker}", "must be one of venv, pyxis"),
        ("{kind: pyxis, image: i, dependencies: [a]}", "dependencies has no meaning"),
        ("{pyhton: a}", "did you mean python"),
        ("nosuch", "there is no environment 'nosuch'"),
    ],
)
def test_a_wrong_record_is_refused(block, words):
    with pytest.raises(RecipeFault, match=words.replace(".", r"\.")):
        complete(loaded(block), Site(), executors.choose(True))


def test_the_option_and_then_the_recipe_come_before_the_site(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ENVIRONMENTS", tmp_path)
    for name in "abc":
        (tmp_path / f"{name}.yaml").write_text(f"variables: {{WHICH: {name}}}\n")
    site, local = Site(default_environment="a"), executors.choose(True)
    own = recipes.load("demo", ["+environment=b"], {"environment": "c"})
    chosen = [recipes.load("demo"), loaded("b"), own]
    filled = [complete(each, site, local).config["environment"] for each in chosen]
    assert [each["name"] for each in filled] == ["a", "b", "c"]
    assert filled[2]["variables"] == {"WHICH": "c"}, "the whole record is in the run's recipe"


def test_a_backend_whose_package_is_missing_is_found_with_its_environment():
    asked = recipes.load("demo_grpo", ["rollout_engine=vllm", "resources.rollout=1"])
    (finding,) = inside.inside(Context(asked, Site(), executors.choose(True)))
    assert finding.state == "failed" and "lacks vllm" in finding.line
    assert "environment=vllm" in finding.line
    own = recipes.load("demo_grpo")
    (finding,) = inside.inside(Context(own, Site(), executors.choose(True)))
    assert finding.state == "ok"


# The environment, the words that are shown, and further settings of the recipe.
FAULTS: dict[str, tuple[str, ...]] = {
    "an image that does not exist": ("{kind: apptainer, image: /no.sif}", "there is no image"),
    "a bind that does not exist": ("{kind: apptainer, image: i, binds: [/no]}", "there is no /no"),
    "a runtime that is not there": ("{kind: apptainer, image: i}", "not installed there"),
    "a failing module": ("{setup: ['module() { return 1; }'], modules: [nosuch]}", "module avail"),
    "a setup line that fails": (
        "{setup: ['false']}",
        "'false' failed: correct it in environment.setup in the recipe",
    ),
    "an interpreter that does not exist": ("{python: /no/python}", "correct environment.python"),
    "another architecture": ("{python: PLACE/other}", "another architecture"),
    "a Python without torch": ("{python: /usr/bin/python3}", "has no torch"),
    "packages in ~/.local that come first": (
        "{python: OWN/bin/python3, prefix: [env, -u, PYTHONNOUSERSITE, PYTHONUSERBASE=PLACE]}",
        "set PYTHONNOUSERSITE=1",
    ),
    "a torch that is too old": (
        "{prefix: [env, 'PYTHONPATH=PLACE/old:REPO']}",
        "torch 2.5.1 is not supported: the trainer needs 2.11 or newer",
    ),
    "another Python": ("{python: PYTHON310}", "the trainer needs 3.11 to 3.13"),
    "no visible GPU": ("{prefix: [env]}", "sees no GPU", "GPU"),
    "a path that is missing inside": (
        "{kind: apptainer, image: PLACE/image, python: PREFIX/bin/python, "
        "setup: ['PATH=PLACE/bin:$PATH'], binds: ['/usr:/usr:ro', OWN, PREFIX, REPO]}",
        "is not there inside: add its folder to environment.binds",
        "dataset.data_files=PLACE/data.jsonl",
    ),
}


@pytest.fixture(scope="module")
def injected(tmp_path_factory) -> dict[str, str]:
    """What the words in capitals of FAULTS stand for."""
    place = tmp_path_factory.mktemp("faults")
    version = ".".join(map(str, sys.version_info[:2]))
    (place / f"lib/python{version}/site-packages").mkdir(parents=True)
    (place / "old/torch").mkdir(parents=True)
    (place / "old/torch/__init__.py").write_text("__version__ = '2.5.1'\n")
    (place / "data.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 64)
    # An ELF file of a machine that does not exist.
    program = bytearray(Path(sys.executable).resolve().read_bytes()[:4096])
    program[18:20] = b"\xff\xfe"
    (place / "other").write_bytes(program)
    (place / "other").chmod(0o755)
    if shutil.which("gcc"):
        containers.make(place)
    base = Path(os.path.realpath(sys.executable)).parent.parent
    words = {"PLACE": place, "PREFIX": sys.prefix, "OWN": base, "REPO": paths.REPO_ROOT}
    other = [Path("/usr/bin/python3.10"), *Path.home().glob(".pyenv/versions/3.10*/bin/python3.10")]
    words["PYTHON310"] = next((str(each) for each in other if each.exists()), "")
    return {name: str(value) for name, value in words.items()}


def inject(fault: str, injected: dict[str, str]) -> tuple[list[str], str]:
    """The overrides of a fault, and the words that are shown; skips what this host cannot do."""
    block, words, *more = FAULTS[fault]
    if "image: PLACE" in block and (os.geteuid() or not shutil.which("gcc")):
        pytest.skip("the tests' Apptainer needs root and gcc")
    if "PYTHON310" in block and not injected["PYTHON310"]:
        pytest.skip("there is no Python 3.10")
    if fault == "a runtime that is not there" and shutil.which("apptainer"):
        pytest.skip("Apptainer is installed")
    given = [f"+environment={block}", *more]
    for name, value in injected.items():
        given = [text.replace(name, value) for text in given]
    return given, words


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_its_remedy(fault, injected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no container binds it
    given, words = inject(fault, injected)
    site = Site(gpu="h100-80" if "GPU" in given else None)
    asked = recipes.load("demo", [each for each in given if each != "GPU"])
    context = Context(asked, site, executors.choose(True))
    found = findings("environment", inside.inside, context)
    assert any(each.state == "failed" and words in each.line for each in found), found


def test_what_the_probe_sees_inside(monkeypatch, tmp_path):
    monkeypatch.setattr(probe.site, "getusersitepackages", lambda: str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = " ".join(words for words, _ in probe.faults([], False, ["/no/data"]))
    assert "/no/data is not there inside" in found
    assert f"packages in {tmp_path} come before" in found


WHEEL = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/own-1.0-py3-none-any.whl", "w") as file:
        file.writestr("own.py", "VALUE = 1")
        info = "Metadata-Version: 2.1\\nName: own\\nVersion: 1.0\\n"
        file.writestr("own-1.0.dist-info/METADATA", info)
        file.writestr("own-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        file.writestr("own-1.0.dist-info/RECORD", "")
    return "own-1.0-py3-none-any.whl"
"""


def write_package(folder: Path, backend: str = WHEEL) -> str:
    """Write a package that needs no index to be built; return the dependency that names it."""
    folder.mkdir()
    (folder / "backend.py").write_text(backend)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{folder.name}"\nversion = "1.0"\n'
    )
    return f"{folder.name} @ file://{folder}"


def test_resume_builds_an_environment_that_was_removed_again(tmp_path):
    block = {"dependencies": [write_package(tmp_path / "own")]}
    environment, root = Environment.of(block), tmp_path / "shared"
    run = Run(root / "runs" / RUN.name)
    run.path.mkdir(parents=True)
    python = environment.interpreter(root)
    (run.path / files.JOB_SCRIPT).write_text(f"export ENV_PYTHON={python}\n")
    for dependencies in (["another"], block["dependencies"]):
        run.write(files.RECIPE, {"environment": {"dependencies": dependencies}})
        if dependencies == ["another"]:
            advice = f"was removed.*cookbook resume {RUN.name} --code current"
            with pytest.raises(RunFault, match=advice):
                built.restore(run, lambda text: None)
        else:
            built.restore(run, lambda text: None)
    assert Path(str(python)).is_file()


def test_a_dependency_by_its_address_is_built_or_says_why_not(tmp_path):
    """Needs no package index."""
    write_package(tmp_path / "own")
    write_package(tmp_path / "broken", "import not_there")

    def built_of(folder: str, say: Callable[[str], None] = print) -> Path:
        environment = Environment(dependencies=(f"{folder} @ file://{tmp_path}/{folder}",))
        return built.build(environment, tmp_path / "shared", say)

    said: list[str] = []
    python = built_of("own") / "bin/python"
    record = json.loads((python.parents[1] / "cookbook.json").read_text())
    assert record["dependencies"] == [f"own @ file://{tmp_path}/own"]
    assert built_of("own", said.append) == python.parents[1] and said == [], "once"
    assert subprocess.run([python, "-c", "import own; assert own.VALUE"]).returncode == 0
    with pytest.raises(PreflightFault, match="No module named 'not_there': name a wheel of it"):
        built_of("broken")


def test_dependencies_come_from_the_folder_of_a_site_without_internet(tmp_path, monkeypatch):
    """With uv's settings as setup.sh --from writes them."""
    kit = tmp_path / "kit"
    kit.mkdir()
    for path in Path(sys.prefix).iterdir():
        (kit / path.name).symlink_to(path)
    (kit / "uv.toml").write_text(f'no-index = true\nfind-links = ["{tmp_path}"]\n')
    monkeypatch.setenv("COOKBOOK_VENV", str(kit))
    with zipfile.ZipFile(tmp_path / "carried_here-1.0-py3-none-any.whl", "w") as wheel:
        about = "carried_here-1.0.dist-info"
        wheel.writestr("carried_here.py", "")
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: carried_here\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    path = built.build(Environment(dependencies=("carried-here",)), tmp_path / "shared", print)
    assert json.loads((path / "cookbook.json").read_text())["packages"] == ["carried-here==1.0"]
    with pytest.raises(PreflightFault, match=r"left-behind.*: bash setup\.sh --bundle FOLDER"):
        built.build(Environment(dependencies=("left-behind",)), tmp_path / "shared", print)
