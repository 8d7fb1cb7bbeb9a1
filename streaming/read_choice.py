"""How this load's files are read: the strategy that was asked for, or that suits where they lie, and its numbers.

[no-torch]
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from streaming.checkpoint.remote_file import WeightFile
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointError, OptionError
from streaming.file_faults import system_fault
from streaming.mount_table import file_system_of
from streaming.open_files import FileState, state_of
from streaming.options import LoadOptions
from streaming.plan import LoadPlan
from streaming.read_plan import ReadPlan
from streaming.read_strategy import (
    BACK_ENDS,
    BATCH_NBYTES,
    BUFFERS_NBYTES,
    NETWORK,
    ReadChoice,
    ReadMethod,
    Surroundings,
    choose_strategy,
    whole_file_bytes,
)

logger = logging.getLogger(__name__)
LEAST_AHEAD_NBYTES = 64 << 20


def choose_reading(checkpoint: Checkpoint, plan: LoadPlan, options: LoadOptions) -> ReadChoice:
    """The choice, logged in one line. Raises OptionError for options that do not go with it."""
    choice = _choose(checkpoint, plan, options)
    logger.info("reading with %s: %s", choice.strategy, choice.reason)
    if choice.strategy == "torchao":
        _refuse_torchao(checkpoint)
    if options.loader.multithreaded and choice.strategy in ("dummy", "remote"):
        raise OptionError(f"--model-loader-extra-config: reading threads are for local files; {choice.reason}")
    for name, value in (("num-threads", options.safetensors_prefetch_num_threads),
                        ("block-size", options.safetensors_prefetch_block_size)):  # fmt: skip
        if value is not None and choice.strategy != "prefetch":
            raise OptionError(
                f"--safetensors-prefetch-{name} goes with --safetensors-load-strategy prefetch; "
                f"{choice.strategy} is used: {choice.reason}"
            )
    return choice


def _choose(checkpoint: Checkpoint, plan: LoadPlan, options: LoadOptions) -> ReadChoice:
    if checkpoint.format == "dummy":
        return ReadChoice("dummy", "no file is read")
    if checkpoint.address is not None:
        return ReadChoice("remote", "byte ranges are fetched from the address")
    if options.load_format in BACK_ENDS:
        if options.load_format == "instanttensor":
            _check_instanttensor(options.device)
        return ReadChoice(options.load_format, f"--load-format {options.load_format}")
    folder = checkpoint.root if checkpoint.root.is_dir() else checkpoint.root.parent
    kind = file_system_of(next((file for file in checkpoint.files if isinstance(file, Path)), folder))
    memory = None
    if kind in NETWORK:
        from streaming.available_memory import available_nbytes

        memory = available_nbytes()
    found = Surroundings(kind, plan.read_nbytes, memory, torchao=_is_torchao(checkpoint))
    return choose_strategy(options.safetensors_load_strategy, found)


def _check_instanttensor(device: str) -> None:
    """The device first: where there is none, the package is of no use."""
    if not device.startswith("cuda"):
        raise OptionError(
            f"--load-format instanttensor needs a CUDA GPU, which the package reads into: give --device cuda, not "
            f"{device}, or leave the format out"
        )
    if find_spec("instanttensor") is None:
        raise OptionError("--load-format instanttensor needs a package: pip install 'instanttensor>=0.2.2'")


def _is_torchao(checkpoint: Checkpoint) -> bool:
    quantized = checkpoint.config.get("quantization_config")
    return isinstance(quantized, Mapping) and quantized.get("quant_method") == "torchao"


def _refuse_torchao(checkpoint: Checkpoint) -> None:
    if not _is_torchao(checkpoint):
        raise OptionError(
            f"--safetensors-load-strategy torchao: {checkpoint.name} is not serialized by torchao (its config.json has "
            "no quantization_config with quant_method torchao)"
        )


def reader_nbytes(plan: LoadPlan, choice: ReadChoice) -> int:
    """What the reader holds at once beside everything else: `eager` the largest file, a back end its buffers (that of
    instanttensor holds the largest tensor twice, both times on the GPU).

    Raises OptionError (see read_strategy).
    """
    if choice.strategy == "runai_streamer":
        return min(BATCH_NBYTES, plan.read_nbytes)
    if choice.strategy == "fastsafetensors":
        return BUFFERS_NBYTES
    if choice.strategy == "instanttensor":
        return 2 * max((item.tensor.nbytes for item in plan.items if not item.is_received), default=0)
    if choice.strategy != "eager":
        return 0
    read = [item for item in plan.items if not item.is_received]
    files = {item.tensor.file: 0 for item in read}
    numbers = {file: number for number, file in enumerate(files)}
    sizes = [state[2] for state in states_of(list(files))]
    return whole_file_bytes([(numbers[item.tensor.file], item.direct) for item in read], sizes)[1]


def states_of(files: list[object]) -> list[FileState]:
    """The files' states now. Raises CheckpointError for one that is gone."""
    states = []
    for file in files:
        try:
            states.append(state_of(os.stat(str(file))))
        except OSError as error:
            raise CheckpointError(system_fault(file, error.errno)) from error
    return states


def planned_states(
    read_plan: ReadPlan, choice: ReadChoice, earlier: Mapping[WeightFile, FileState]
) -> tuple[FileState, ...]:
    """The states of the files that are read, as they were `earlier`, before their headers were, where that is known;
    () where there are none of this machine."""
    if choice.strategy in ("dummy", "remote"):
        return ()
    return tuple(earlier.get(file) or states_of([file])[0] for file in read_plan.files)


def read_method(options: LoadOptions, choice: ReadChoice) -> ReadMethod:
    """What the reader is told."""
    ahead = None
    if choice.strategy == "prefetch":
        from streaming.available_memory import available_nbytes

        ahead = available_nbytes()
    return ReadMethod(
        strategy="direct" if choice.strategy == "torchao" else choice.strategy,  # the parts are tensors like others
        threads=options.loader.threads,
        ahead_threads=options.safetensors_prefetch_num_threads or ReadMethod.ahead_threads,
        block_nbytes=options.prefetch_block_nbytes or ReadMethod.block_nbytes,
        ahead_nbytes=ReadMethod.ahead_nbytes if ahead is None else max(LEAST_AHEAD_NBYTES, ahead // 2),
    )
