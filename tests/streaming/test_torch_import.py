"""The shortened import of torch: computes what a plain import computes, and nobody can tell what was put off.

The order of events is tested with a stand-in for torch (a package of a few lines), the results with torch itself. Each
case needs a process of its own, since torch can be imported once only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streaming.torch_import import PLAIN_IMPORT, import_torch, installed_version
from tests.streaming.torch_sample import sample

ROOT = Path(__file__).parent.parent.parent
DEFERS = re.fullmatch(r"2\.13\.\d+\+cpu", torch.__version__) is not None


def run(program: str, *, first_on_path: Path | None = None, plain: bool = False) -> str:
    """What a fresh interpreter prints; an error in it is an error here."""
    path = os.pathsep.join(str(entry) for entry in (first_on_path, ROOT) if entry)
    environment = {**os.environ, "PYTHONPATH": path, PLAIN_IMPORT: "1" if plain else "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT = "import sys\nfrom streaming.torch_import import import_torch\nimport_torch(whole=False)\nimport torch\n"


def stand_in(folder: Path, *, version: str = "2.13.7+cpu", body: str = "") -> Path:
    """A package called torch with the parts that are touched, whose modules print their names as they are run."""
    sources = {
        "__init__.py": (
            "import importlib\nfrom torch import _C, _opaque_base\n"
            "_lazy_modules = {'onnx'}\n"
            "def __getattr__(name):\n"
            "    if name in _lazy_modules:\n        return importlib.import_module(f'.{name}', __name__)\n"
            "    raise AttributeError(name)\n"
            f"from torch import export as export\nfrom torch import _meta_registrations\n{body}\nprint('torch')\n"
        ),
        "_C.py": "bound = []\ndef _set_generator_metaclass(meta):\n    bound.append(meta)\n",
        "_opaque_base.py": "class OpaqueBaseMeta(type): pass\n",
        "version.py": f"__version__ = '{version}'\n",
        "export/__init__.py": "print('export')\nanswer = 42\n",
        "export/graph.py": "print('export.graph')\n",
        "_meta_registrations.py": "import torch._refs\nprint('metas')\n",
        "_refs.py": "print('refs')\n",
        "other.py": "print('other')\n",
    }
    for name, source in sources.items():
        path = folder / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


def test_modules_that_are_put_off_are_not_imported(tmp_path: Path) -> None:
    program = f"{IMPORT}print([n for n in sys.modules if n in ('torch.export', 'torch._meta_registrations')])"
    assert run(program, first_on_path=stand_in(tmp_path)) == "torch\n[]\n"


@pytest.mark.parametrize(
    ("use", "printed"),
    [
        ("import torch.other", "export refs metas other"),  # any further module of torch: all in torch's own order
        ("import torch._refs", "export refs metas"),  # one that cannot be imported before the others
        ("import torch.export.graph", "export refs metas export.graph"),
        ("torch.export.answer", "export refs metas"),  # as an attribute
        ("torch._refs", "export refs metas"),
        ("from torch import export", "export refs metas"),
        ("import json, anyio", ""),
    ],
)
def test_they_are_made_up_for_in_order_and_once(tmp_path: Path, use: str, printed: str) -> None:
    watching = "sum(type(finder).__module__ == 'streaming.torch_import' for finder in sys.meta_path)"
    program = f"{IMPORT}{use}\n{use}\nprint({watching})"
    assert run(program, first_on_path=stand_in(tmp_path)).split() == [
        "torch",
        *printed.split(),
        "0" if printed else "1",
    ]


def test_a_made_up_module_keeps_its_own_spec(tmp_path: Path) -> None:
    program = (
        f"{IMPORT}import torch._refs as r\nprint(r.__spec__.name, r.__spec__.origin == r.__file__, r.__loader__.name)"
    )
    assert run(program, first_on_path=stand_in(tmp_path)).splitlines()[-1] == "torch._refs True torch._refs"


@pytest.mark.parametrize("body", ["export.answer", "import torch.export.graph", "from torch.export import answer"])
def test_what_torch_itself_uses_while_it_is_imported_is_not_put_off(tmp_path: Path, body: str) -> None:
    program = f"{IMPORT}assert torch.export.answer == 42"
    printed = run(program, first_on_path=stand_in(tmp_path, body=body)).split()
    assert printed.index("export") < printed.index("torch")
    assert "metas" not in printed[: printed.index("torch")]


def test_generators_can_be_made_without_what_is_put_off(tmp_path: Path) -> None:
    program = f"{IMPORT}print(torch._C.bound == [torch._opaque_base.OpaqueBaseMeta])"
    assert run(program, first_on_path=stand_in(tmp_path)) == "torch\nTrue\n"


@pytest.mark.parametrize("version", ["2.12.1+cpu", "2.14.0+cpu", "2.13.0", "2.13.0+cu130", "not-a-version"])
def test_other_builds_are_imported_whole(tmp_path: Path, version: str) -> None:
    assert run(IMPORT, first_on_path=stand_in(tmp_path, version=version)).split() == [
        "export",
        "refs",
        "metas",
        "torch",
    ]


def test_the_environment_variable_makes_it_a_plain_import(tmp_path: Path) -> None:
    assert run(IMPORT, first_on_path=stand_in(tmp_path), plain=True).split() == ["export", "refs", "metas", "torch"]


def test_by_default_the_import_is_whole_and_the_collector_is_back_after_it(tmp_path: Path) -> None:
    program = (
        "import gc\nfrom streaming.torch_import import import_torch\nimport_torch()\nprint(gc.isenabled())\n"
        "gc.disable()\nimport sys\n[sys.modules.pop(n) for n in list(sys.modules) if n.startswith('torch')]\n"
        "import_torch()\nprint(gc.isenabled(), gc.get_freeze_count())"
    )
    printed = run(program, first_on_path=stand_in(tmp_path)).split()
    assert printed == [
        *["export", "refs", "metas", "torch"],
        "True",
        *["export", "refs", "metas", "torch"],
        "False",
        "0",
    ]


def test_an_import_that_fails_says_how_to_do_it_plainly(tmp_path: Path) -> None:
    program = (
        "from streaming.torch_import import import_torch\n"
        "try:\n    import_torch(whole=False)\nexcept ImportError as error:\n    print(error.__notes__)"
    )
    printed = run(program, first_on_path=stand_in(tmp_path, body="import torch.nothing"))
    assert printed == "['Set FIRSTLAYER_PLAIN_TORCH_IMPORT=1 to import torch as a whole.']\n"


def test_the_version_is_known_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_version() == torch.__version__
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert installed_version() == ""


def test_importing_it_again_does_nothing() -> None:
    before = list(sys.meta_path)
    import_torch(whole=False)
    assert sys.meta_path == before


def test_the_shortened_import_computes_what_the_plain_one_computes() -> None:
    program = (
        IMPORT + "import json\nfrom tests.streaming.torch_sample import sample\n"
        "print(json.dumps([[name, result, 'torch._decomp' in sys.modules] for name, result in sample()]))"
    )
    results = json.loads(run(program))
    expected = [[name, result] for name, result in sample()]
    assert [result[:2] for result in results] == json.loads(json.dumps(expected))
    if DEFERS:
        assert next(name for name, _, made_up in results if made_up) == "save and load"


@pytest.mark.skipif(not DEFERS, reason="nothing is put off for this version of torch")
def test_what_is_put_off_leaves_no_kernel_of_a_real_device_unregistered() -> None:
    """Of what it registers with the dispatcher, only Meta kernels (and one for MPS) belong to existing operators; of
    what else it tells the C++ side, only the generators' metaclass, which is bound early, and a type for tracing."""
    program = (
        IMPORT
        + """
import importlib, json, re
kernels, defined, told = set(), set(), set()
library = torch.library.Library
impl, define = library.impl, library.define
def record_impl(self, name, kernel, dispatch_key="", **options):
    kernels.add((self.ns, dispatch_key or self.dispatch_key))
    return impl(self, name, kernel, dispatch_key, **options)
def record_define(self, schema, *arguments, **options):
    defined.add(self.ns)
    return define(self, schema, *arguments, **options)
library.impl, library.define = record_impl, record_define
def record_call(frame, event, function):
    if event == "c_call" and "torch" in (getattr(function, "__module__", None) or ""):
        told.add(function.__name__)
sys.setprofile(record_call)
importlib.import_module("torch._decomp")
sys.setprofile(None)
changing = sorted(name for name in told if re.match("_?(set|register|enable|init|add_|install)", name))
print(json.dumps([sorted(kernels), sorted(defined), changing]))
"""
    )
    kernels, defined, changing = json.loads(run(program))
    assert "prims" in defined  # it did record
    existing = {(namespace, key) for namespace, key in kernels if namespace not in defined}
    assert {key for _, key in existing} == {"Meta", "MPS"}
    assert changing == ["_register_opaque_type", "_set_generator_metaclass"]


FURTHER = (
    "torch._decomp.decompositions_for_jvp", "torch._dynamo", "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx", "torch._prims.context", "torch._refs.nn.functional", "torch.distributed.tensor",
    "torch.export", "torch.nn.utils._expanded_weights", "torch.onnx", "torch.utils._content_store",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("module", FURTHER)
def test_every_further_module_of_torch_can_come_first(module: str) -> None:
    program = (
        f"{IMPORT}import importlib\nmodule = importlib.import_module('{module}')\nprint(module.__spec__.loader.name)"
    )
    assert run(program).strip() == module


@pytest.mark.slow
def test_transformers_and_a_compiler_run_after_it(tmp_path: Path) -> None:
    program = (
        IMPORT
        + """
import transformers
from pathlib import Path
from examples.write_tiny_model import TinyModel, write_tiny_model
folder = write_tiny_model(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(%r), model=TinyModel())
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
with torch.no_grad():
    print(model(torch.tensor([[1, 2, 3]])).logits.double().sum().item())
    compiled = torch.compile(torch.nn.functional.silu, backend="eager")
    print(torch.equal(compiled(torch.ones(3)), torch.nn.functional.silu(torch.ones(3))))
"""
    )
    shortened = run(program % str(tmp_path / "shortened"))
    assert shortened == run(program % str(tmp_path / "plain"), plain=True)
    assert shortened.endswith("True\n")
