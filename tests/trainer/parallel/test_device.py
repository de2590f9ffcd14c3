"""GPUs that torch cannot use end a run at its start: it would train on CPUs in silence."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from runspec import devices
from trainer.errors import BadNodeError, ConfigError, PeerError
from trainer.parallel import device
from trainer.parallel import world as distributed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")


@pytest.fixture
def gpu_node(tmp_path, monkeypatch):
    """The device files of a node with two GPUs, and the version that its driver shows."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat\nGCC\n")
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    monkeypatch.setattr(device, "DRIVER", driver)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def test_auto_does_not_train_on_the_cpus_of_a_gpu_node(gpu_node):
    with pytest.raises(ConfigError) as raised:
        distributed.start("auto")
    (fault,) = raised.value.faults
    assert f"this node has GPUs ({gpu_node}/nvidia0, {gpu_node}/nvidia1)" in fault
    assert f"torch {torch.__version__} cannot use them" in fault
    assert "bash setup.sh --torch cu126" in fault and "device=cpu" in fault
    assert device.choose("cpu") == "cpu"


@pytest.mark.parametrize(
    ("cuda", "hip", "why"),
    [
        (None, None, "it is a build for CPUs"),
        ("13.0", None, "it is built for CUDA 13.0, and the driver is 535.104.05"),
        (None, "6.4", "it is built for ROCm 6.4, and the driver is 535.104.05"),
    ],
)
def test_the_reason_names_build_and_driver(gpu_node, monkeypatch, cuda, hip, why):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(ConfigError, match=why):
        device.choose("auto")


def test_a_job_without_gpus_on_such_a_node_trains_on_cpus(gpu_node, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert device.choose("auto") == "cpu"
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    with pytest.raises(ConfigError, match="this node has GPUs"):
        device.choose("auto")


def test_where_there_is_no_gpu_auto_is_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "FOLDER", tmp_path)
    assert device.choose("auto") == "cpu"


@pytest.mark.parametrize("devices", [["cuda", "cpu", "cuda"], ["cuda"] * 3, ["cpu"] * 3])
def test_ranks_agree_on_their_device_before_they_meet(devices, monkeypatch):
    monkeypatch.setenv("NODE_NAME", "gpu7")
    store = HashStore()

    def ask(rank: int) -> Exception | None:
        try:
            return device.agree(devices[rank], store, rank, len(devices))
        except (BadNodeError, PeerError) as error:
            return error

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(ask, range(3)))
    if len(set(devices)) == 1:
        assert found == [None] * 3
        return
    assert [type(each) for each in found] == [PeerError, BadNodeError, PeerError]
    told = "node gpu7 shows torch no GPU, and other nodes of this run do"
    assert told in str(found[1]) and f"another rank failed: rank 1: {told}" in str(found[0])
    assert not found[0].permanent, "another node can help"


def test_nothing_answers_on_the_cpus_of_a_gpu_node(gpu_node, capsys):
    from trainer import generate

    assert generate.main([str(gpu_node), "a question"]) == 1
    assert "error: device: this node has GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["cuda", "auto", "cpu"])
def test_attention_does_not_make_a_graph_for_each_length(asked, monkeypatch):
    """cuDNN's does: torch uses it on H100, if it may."""
    monkeypatch.setattr(devices, "gpus", list)
    torch.backends.cuda.enable_cudnn_sdp(True)
    device.choose(asked)
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_a_rank_computes_on_its_own_gpu(monkeypatch):
    """Also what names none: its streams and kernels."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (device.own("auto"), current) == (torch.device("cuda", 1), [1])
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="local rank 2 needs GPU 2, but this host shows 2"):
        device.own("cuda")
