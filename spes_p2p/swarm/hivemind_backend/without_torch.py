"""hivemind's p2p and DHT without the rest of it: a package's `__init__` runs when it is asked for a name, not before.

`import hivemind` loads PyTorch, SciPy and all of averaging, seconds of CPU time; `hivemind.p2p` and `hivemind.dht.node`
need none of that. So commands such as `status` answer at once. Who wants the rest of hivemind still gets it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

PACKAGES: dict[str, dict[str, str]] = {
    "hivemind": {},
    "hivemind.dht": {},
    "hivemind.utils": {
        "MSGPackSerializer": "serializer",
        "SerializerBase": "serializer",
        "get_logger": "logging",
        "get_dht_time": "timed_storage",
    },
}
"""Packages, and the names that their own modules import from them: in which module each is."""


def postpone() -> None:
    """Makes the packages importable as said above; those that were imported already stay as they are."""
    for name, places in PACKAGES.items():
        if name not in sys.modules:
            module = sys.modules[name] = _postponed(name, places)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)


def _postponed(name: str, places: dict[str, str]) -> ModuleType:
    spec = find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"there is no package {name}", name=name)
    module, loader = module_from_spec(spec), spec.loader

    def find(attribute: str) -> Any:
        if attribute in places:
            return getattr(importlib.import_module(f"{name}.{places[attribute]}"), attribute)
        if (child := sys.modules.get(f"{name}.{attribute}")) is not None:  # one that is being imported
            return child
        if attribute.startswith("__") and attribute != "__version__":
            raise AttributeError(f"module {name} has no attribute {attribute}")
        if "__getattr__" in vars(module):
            del module.__getattr__
            loader.exec_module(module)
        return getattr(module, attribute)

    module.__getattr__ = find  # type: ignore[method-assign]
    return module
