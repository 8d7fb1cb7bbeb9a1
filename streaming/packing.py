"""`--kernels fast`: packed copies of the weights, made in the forward thread behind the first step of a generation.

Packing is too slow to lie on a weight's way in (0.1 to 0.3 GB/s a thread), so the first token comes from the weights as
they are stored. From the second on the packed copies are used, whatever the load was doing meanwhile: which step uses
what is fixed beforehand, so a run can be repeated. The stored weights stay, since products of more rows read them; the
budget counts both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layers.linear import Linear
from quant.kernels import Kernels
from quant.packed import pack, reads_packed
from streaming.runner import ModelRunner
from streaming.trace import OpenSpan


def pack_layers(runner: ModelRunner, *, stop: Callable[[], None]) -> int:
    """Give every linear layer of the decoder its packed copy, where its scheme has one and it has none yet.

    Waits for each layer to be ready. `stop` raises to cancel, between layers. Returns the bytes of all copies.
    """
    nbytes = 0
    if runner.lead is not None:
        runner.lead.pack()
    layers = [runner.model.get_submodule(f"model.{name}") for name in runner.layers]
    for name, layer in zip(runner.layers, layers, strict=True):
        with runner.residency.lease(name, stop=stop) as moment, _span(runner, name):
            runner.device.order_after(moment)
            stop()
            linears = [module for module in layer.modules() if isinstance(module, Linear)]
            _pack([module for module in linears if _is_due(module)], runner.kernels)
            nbytes += sum(module.packed.nbytes for module in linears if module.packed is not None)
    return nbytes


def _span(runner: ModelRunner, name: str) -> OpenSpan:
    return runner.tracer.span("post-process", f"pack {name}", layer=name)


def _is_due(module: Linear) -> bool:
    """Activations are of the dtype that the module's weight has when it is wide."""
    return module.packed is None and reads_packed(module.scheme, module.dtype)


def _pack(modules: Sequence[Linear], kernels: Kernels) -> None:
    copies = pack([(module.scheme, module.stored()) for module in modules], kernels=kernels)
    for module, packed in zip(modules, copies, strict=True):
        module.packed = packed
