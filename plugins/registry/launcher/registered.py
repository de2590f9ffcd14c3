"""Registered models for the rest of the kit, which knows them as models:/NAME@ALIAS."""

import re

from launcher.do.models import Model
from launcher.errors import UsageFault
from launcher.site import Site
from plugins.registry.launcher import registry
from plugins.registry.launcher import store as stores

_URI = re.compile(r"models:/([^@/]+)(?:@([^@/]+)|/(\d+))\Z")


def model(site: Site, uri: str) -> Model:
    """Return the version that models:/NAME@ALIAS or models:/NAME/VERSION names.

    Raises:
        UsageFault: there is none.
        StoreFault: the registry cannot be read.
    """
    match = _URI.match(uri)
    if match is None:
        raise UsageFault(f"{uri!r} is not models:/NAME@ALIAS or models:/NAME/VERSION")
    name, alias, number = match.groups()
    with stores.client(stores.at(site.root, site.tracking), write=False) as client:
        version = registry.version(client, name, alias or number)
    return Model(version.folder, f"{name} v{version.number}", registered_as=name)
