"""The first import of torch, made shorter. [no-torch]

It is the largest fixed cost of a short run: 1.6 s of one core for the CPU build of torch 2.13. More than a third goes
into registrations that only tracing and compiling need, into `torch.export`, and into the garbage collector walking a
million young objects that all stay. So the collector rests during the import, and the command line, whose process runs
our own code only, puts those modules off: 1.0 s are left. They are made up for, in the order in which torch imports
them, as soon as anybody imports any further module of torch, or asks for one of them as an attribute. All that the C++
side misses until then are kernels of the meta device, and the operators that those modules define for tracing (a test
keeps count).

Only builds of torch that this was tested with are treated so. FIRSTLAYER_PLAIN_TORCH_IMPORT=1 turns all of it off.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from streaming.collector import collector_at_rest
from streaming.library_environment import prepare_libraries

logger = logging.getLogger(__name__)

PLAIN_IMPORT = "FIRSTLAYER_PLAIN_TORCH_IMPORT"
"""The environment variable that, set to 1, makes `import_torch` a plain import."""

_TESTED = re.compile(r"2\.13\.\d+\+cpu")
_DEFERRED = ("torch.export", "torch._meta_registrations")  # in the order in which torch imports them
# Attributes of torch that exist only because the deferred modules import them.
_REACHED_THROUGH_THEM = ("_custom_op", "_custom_ops", "_decomp", "_prims", "_refs")


def import_torch(*, whole: bool = True) -> None:
    """Import torch, unless it is imported already.

    `whole=False` puts off what a forward pass does not use. It is for processes that run nothing but this runtime:
    operators that torch implements in Python for the meta device raise NotImplementedError there until they are made up
    for, which using them does not do.
    """
    prepare_libraries()
    if "torch" in sys.modules or os.environ.get(PLAIN_IMPORT) == "1":
        importlib.import_module("torch")
        return
    with collector_at_rest():
        if whole or not _TESTED.fullmatch(installed_version()):
            importlib.import_module("torch")
        else:
            _import_without(_DEFERRED)
    if not whole:
        gc.freeze()  # what the import left behind stays; the collector need never walk it again


def installed_version() -> str:
    """The version of the torch that would be imported, read from its version.py; "" where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    return found[1] if found else ""


class _Deferral(Loader):
    """Answers for the deferred modules while torch is imported: a finder and a loader of placeholders."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["_deferral"] = self  # only now does it answer: the import system has looked it over

    def withdraw(self, name: str) -> None:
        """Take the placeholder away, so that the next import of the name is the real one."""
        self.names.discard(name)
        placeholder = sys.modules.get(name)
        if isinstance(placeholder, _Placeholder):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if getattr(sys.modules.get(parent), child, None) is placeholder:  # no parent: its import has failed
                delattr(sys.modules[parent], child)


class _Placeholder(ModuleType):
    """What the import of torch sees in place of a deferred module; its first real use brings the module itself."""

    def __getattr__(self, name: str) -> Any:
        deferral = vars(self).get("_deferral")
        if deferral is None or (name.startswith("__") and name != "__path__"):
            raise AttributeError(name)
        logger.debug("the import of torch uses %s.%s, which is not put off therefore", self.__name__, name)
        deferral.withdraw(self.__name__)
        return getattr(importlib.import_module(self.__name__), name)


class _MakeUp(Loader):
    """Imports what was deferred, in order, before the first further module of torch: many of those need it to be there,
    and cannot be imported before it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if not name.startswith("torch.") or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        logger.debug("%s is imported: making up for what the import of torch put off", name)
        for deferred in self._names:
            importlib.import_module(deferred)
        # Where that brought the very module that is being found, hand it out; it must not be executed twice.
        return ModuleSpec(name, self, loader_state=sys.modules.pop(name)) if name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state
        spec.loader_state = module.__spec__  # which the import system is about to replace by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def _import_without(names: Sequence[str]) -> None:
    deferral = _Deferral(names)
    sys.meta_path.insert(0, deferral)
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        error.add_note(f"Set {PLAIN_IMPORT}=1 to import torch as a whole.")  # a second try in one process crashes
        raise
    finally:
        sys.meta_path.remove(deferral)
        for name in names:
            deferral.withdraw(name)
    # torch._prims.rng_prims does this, which is put off; until then no torch.Generator could be made.
    torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
    # The names that torch imports itself when they are first asked for.
    torch._lazy_modules.update(name.removeprefix("torch.") for name in (*names, *_REACHED_THROUGH_THEM))
    sys.meta_path.insert(0, _MakeUp(names))
