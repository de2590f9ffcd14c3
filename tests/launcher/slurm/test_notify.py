"""Slurm's mail about a run: the recipe's block, and the site's."""

from launcher.recipe import load as recipes
from launcher.site import Site, complete
from launcher.slurm.executors import choose
from tests.launcher.kit import project


def test_the_recipe_comes_before_the_site_and_mail_is_slurms(tmp_path):
    path = project(tmp_path, "pass\n", notify={"mail": "me@example.org", "events": ["end"]})
    site = Site(notify={"mail": "us@example.org"})
    found = complete(recipes.load(str(path)), site, executor=choose(True)).notify
    assert (found.mail, found.mail_types) == ("me@example.org", ["END"])
