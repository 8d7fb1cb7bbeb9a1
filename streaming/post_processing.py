"""Post-processing of a model's layers on its device: which parameters, and doing it to one layer.

A layer is processed when its last item has been stored, behind all its projections and before it is published, so
nobody has seen it before. The shell is built for what is there afterwards: its parameters are views of the same memory
in the dtypes that it will have, so none of them is ever replaced.

Nothing is processed twice: save-shards and whoever loads one layer leave this stage out, so files hold what was stored
before it, and a load from them processes it as any other. There is no offload to the host, so no parameter makes the
round trip.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from layers.weights import LayerSpec, ParamSpec
from quant.device_features import DeviceFeatures
from quant.post_processing import Step, process, seen_processed, what_to_process
from quant.processed_scheme import Processed

Stored = Mapping[str, Mapping[str, torch.Tensor]]  # parameter -> stored name -> tensor


@dataclass(frozen=True)
class PostProcessing:
    """The steps of each parameter that has any."""

    steps: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)

    def due(self, layer: LayerSpec) -> bool:
        """Whether there is anything to do to the layer."""
        return bool(self.steps) and any(param.name in self.steps for param in layer.params)

    def process(self, stored: dict[str, dict[str, torch.Tensor]], layer: LayerSpec) -> None:
        """Process a layer's parameters where they lie. Raises QuantError for one that has been."""
        for param in layer.params:
            if param.name in self.steps:
                stored[param.name] = process(stored[param.name], self.steps[param.name])

    def seen(self, stored: Stored) -> dict[str, dict[str, torch.Tensor]]:
        """All parameters, in the dtypes that they will have."""
        return {name: seen_processed(tensors, self.steps.get(name, ())) for name, tensors in stored.items()}

    def shell_specs(self, specs: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """The specs of the shell: as stored, processed."""
        return tuple(replace(spec, params=tuple(map(self._shell_spec, spec.params))) for spec in specs)

    def _shell_spec(self, param: ParamSpec) -> ParamSpec:
        steps = self.steps.get(param.name)
        if steps is None:
            return param
        # Without forms its runs are those of what is kept (ParamSpec.kept_rows), which another scheme's would not be.
        runs = param.runs if param.kept_rows == param.run_rows else ()
        return replace(param, scheme=Processed(param.scheme, steps), forms=(), runs=runs)


NO_PROCESSING = PostProcessing()


def plan_processing(specs: Iterable[LayerSpec], features: DeviceFeatures) -> PostProcessing:
    """What a device with these features needs of a model."""
    params = (param for spec in specs for param in spec.params)
    weights = (param for param in params if param.kind.has_scheme)
    steps = {param.name: what_to_process(param.scheme, features) for param in weights}
    return PostProcessing({name: found for name, found in steps.items() if found})
