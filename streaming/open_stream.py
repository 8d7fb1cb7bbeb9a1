"""The stream of a model that does not fit, put together: its plan, its files, the cache of stored forms, the shell."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from layers.decoder import DecoderModel
from quant.device_features import DeviceFeatures
from streaming.available_memory import available_nbytes
from streaming.device import CudaDevice, Device
from streaming.hooks import Hooks
from streaming.item_bytes import open_item_bytes
from streaming.post_processing import NO_PROCESSING, plan_processing
from streaming.prepare import Prepared
from streaming.residency import Residency
from streaming.sizes import format_size
from streaming.stored_cache import StoredCache, cache_key, default_cache_folder, default_limit_nbytes, open_stored_cache
from streaming.stream_plan import StreamPlan
from streaming.trace import Tracer
from streaming.unit_loading import UnitLoading
from streaming.unit_memory import CpuUnits, GpuUnits, UnitMemory
from streaming.weight_checks import WeightChecks
from streaming.weight_stream import WeightStream

logger = logging.getLogger(__name__)
CACHED_SHARE = 0.8  # of the memory that is free: what is read again and again and takes more is dropped behind


def open_stream(
    prepared: Prepared, plan: StreamPlan, *, device: Device, shell: DecoderModel, residency: Residency,
    tracer: Tracer, hooks: Hooks, forms: StoredCache | None,
) -> WeightStream:  # fmt: skip
    """The stream of a plan; nothing is read before it is started. Raises CheckpointError for a file that is gone."""
    items = [item for unit in plan.units for item in unit.items]
    memory = _memory(prepared, plan, device, has_forms=forms is not None, tracer=tracer, warn=hooks.warn)
    reading = prepared.reading
    is_lazy, maps = reading.strategy == "lazy", reading.maps_streamed and prepared.options.device == "cpu"
    if maps:
        logger.info("streamed weights are used where they lie in the page cache: %s", reading.reason)
    loading = UnitLoading(
        open_item_bytes(items, prepared.checkpoint.states, again=True, unleased=is_lazy),
        device, residency, tracer,
        WeightChecks(norm=prepared.config.norm), hooks.warn,
        check_weights=prepared.options.check_weights, drop_behind=exceeds_memory(plan, available_nbytes()),
        maps=maps, maps_forms=maps and is_lazy,
        forms=forms, topology=prepared.topology,
    )  # fmt: skip
    return WeightStream(plan, loading, residency, _forgetting(plan, device, shell), memory)


def _memory(
    prepared: Prepared, plan: StreamPlan, device: Device, *, has_forms: bool, tracer: Tracer,
    warn: Callable[[str], None],
) -> UnitMemory:  # fmt: skip
    if not isinstance(device, CudaDevice):
        return CpuUnits()
    features = DeviceFeatures.detect(device.torch_device, triton=False)
    processing = plan_processing(prepared.specs, features) if prepared.post_process else NO_PROCESSING
    return GpuUnits(device, plan, processing=processing, has_forms=has_forms, tracer=tracer, warn=warn)


def exceeds_memory(plan: StreamPlan, available: int | None) -> bool:
    """Whether a pass reads more than the system can keep of it until the next one: then its page cache would be filled
    for nothing, at the expense of whatever else runs there."""
    return available is not None and plan.pass_disk_nbytes > CACHED_SHARE * (available - plan.tier_nbytes)


def _forgetting(plan: StreamPlan, device: Device, shell: DecoderModel) -> Callable[[str], None]:
    """Gives the memory of a parameter back that the pipeline has loaded: the module has none of it then."""
    storage = {unit.param.name: tuple(unit.storage) for unit in plan.units}

    def forget(param: str) -> None:
        module = param.rpartition(".")[0]
        for name in storage[param]:
            shell.release(f"{module}.{name}")
        device.discard(param)

    return forget


def open_forms(prepared: Prepared, plan: StreamPlan, *, warn: Callable[[str], None]) -> StoredCache | None:
    """Where stored forms are kept that are made once and read ever after; None where there are none, or where
    --cache-size 0 says so."""
    options = prepared.options
    makes = any(unit.is_worth_keeping for unit in plan.streamed) or bool(prepared.plan.experts)
    if not makes or options.cache_limit_nbytes == 0:
        return None
    folder = default_cache_folder() if options.cache_dir is None else Path(options.cache_dir)
    limit = options.cache_limit_nbytes or default_limit_nbytes(folder)
    logger.info("stored forms are kept in %s, at most %s", folder, format_size(limit))
    return open_stored_cache(folder, cache_key(prepared), limit_nbytes=limit, warn=warn)
