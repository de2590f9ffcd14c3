"""trainer/parallel/messages.py: what the ranks of large runs tell each other, in rounds."""

import pytest

from tests.trainer.runs import Ranks, finish, metrics, start, write_config

MODULE = "tests.trainer.parallel.in_rounds"


@pytest.mark.parametrize("ranks", [2, 5, pytest.param(8, marks=pytest.mark.long)])
def test_each_rank_has_all_values_in_order_and_waits_no_longer_than_its_limit(ranks):
    said = finish(Ranks(MODULE, ["check"], ranks), None)
    assert f"{ranks} ranks agree" in said, said
    assert said.count(": RuntimeError") + said.count(": DistBackendError") == ranks - 1, said


def test_a_run_has_the_losses_of_gloos_own_collectives(tmp_path, model_folder, dataset):
    curves = {}
    for module in ("trainer.train sft", MODULE):
        given = {"batch_size": 2, "max_steps": 4, "save_every_n_steps": 2}
        path = write_config(tmp_path / module, model_folder, dataset, **given)
        finish(start(path, 3, module=module))
        curves[module] = [
            (line["loss"], line["grad_norm"], line["tokens"]) for line in metrics(path.parent)
        ]
    own, gloo = curves[MODULE], curves["trainer.train sft"]
    assert len(own) == 4
    for each, other in zip(own, gloo, strict=True):
        assert each == pytest.approx(other, rel=1e-12)
