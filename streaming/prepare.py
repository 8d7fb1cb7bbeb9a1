"""From a name on the command line to a plan: everything that headers can tell, in tenths of a second, without torch."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from layers.architecture import SchemeChoice, layer_specs
from layers.config import parse_config, weight_map
from layers.kv_cache import cache_room_nbytes, check_cache_form, kv_cache_nbytes
from layers.model_config import ModelConfig
from layers.name_lookup import NameLookup
from layers.rank_config import local_config
from layers.topology import Topology
from layers.weights import Dropped, LayerSpec
from quant.dtypes import DType
from quant.policy import default_policy
from streaming.budget import Budget, host_too_small, make_budget, too_small
from streaming.checkpoint import open_checkpoint
from streaming.checkpoint.tensor_names import check_names
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.collector import collector_at_rest
from streaming.errors import OptionError
from streaming.matching import holds_both_tied
from streaming.options import DTYPES, LoadOptions
from streaming.plan import LoadPlan, make_plan
from streaming.read_choice import choose_reading, planned_states, reader_nbytes
from streaming.read_plan import ReadPlan, plan_reads
from streaming.read_strategy import ReadChoice
from streaming.sources import join_sources
from streaming.stated_quantization import disk_method

AUTO_SHARE = 0.9  # of the memory that is free, with --memory auto
DEFAULT_CACHE_TOKENS = 2048  # what the budget sets aside when no --max-model-len is given
STREAMED_CACHE_TOKENS = 256  # the same where weights are streamed: longer caches take the place of weights that stay


@dataclass(frozen=True)
class Prepared:
    """A model that is planned and not yet read."""

    options: LoadOptions
    checkpoint: Checkpoint
    config: ModelConfig
    dtype: DType
    specs: tuple[LayerSpec, ...]
    plan: LoadPlan
    budget: Budget
    read_plan: ReadPlan
    retie: bool  # the config ties embedding and head, yet both are on disk: compared when both have arrived
    reading: ReadChoice
    kv_scales: tuple[tuple[float, float], ...] | None = None  # of an fp8 cache; None: 1 for every layer
    post_process: bool = True  # False: weights stay in the form that files hold (see streaming.post_processing)
    topology: Topology = field(default_factory=Topology)
    model: str = ""  # its name, as it was given
    whole: LoadPlan | None = None  # the plan where everything stays in memory; None: `plan` is that
    budget_of: BudgetOf | None = None  # without a limit
    host_limit_nbytes: int | None = None  # of the host's memory beside a GPU's, as it was when nothing was loaded

    @property
    def local_config(self) -> ModelConfig:
        """The configuration with the heads that this rank has: its caches are sized by it."""
        return local_config(self.config, self.topology)

    @property
    def quantization_words(self) -> str:
        """How the weights are kept, for people: what was asked for, and what is kept as it is on disk."""
        params = [param for spec in self.specs for param in spec.params]
        if self.checkpoint.saved is not None:  # nothing was asked for: shards are kept as they were saved
            return ", ".join(sorted({param.scheme.name for param in params} - {"none"})) or "none"
        found = [param for param in params if param.kept_as_stored]
        if not found:
            return self.options.quantization_words
        asked = "" if self.options.quantization_words == "none" else f"{self.options.quantization_words}; "
        return f"{asked}on disk {', '.join(sorted({param.scheme.name for param in found}))}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know before the load."""
        return (*self.checkpoint.notes, *self.plan.warnings)


def prepare(model: str, options: LoadOptions, *, rank: int = 0, every_rank: bool = False) -> Prepared:
    """Open the headers, parse the config, plan the load of one of the ranks that the options ask for.

    `every_rank`: the plan's `ranks` say what each has, where one matching of names can tell (not of saved shards, nor
    where ranks share the reading).
    Raises CheckpointError with all problems of the files, ModelConfigError, OptionError, BudgetError; reads no weights.
    """
    with collector_at_rest():
        return _prepare(model, options, options.topology(rank), every_rank=every_rank)


def _prepare(model: str, options: LoadOptions, topology: Topology, *, every_rank: bool) -> Prepared:
    checkpoint = open_model(model, options, rank=topology.rank)
    if checkpoint.address is not None:
        check_remote_options(options)
    if checkpoint.format == "dummy":
        from streaming.dummy import check_dummy_options, reseeded

        check_dummy_options(options)
        checkpoint = reseeded(checkpoint, seed=options.seed or 0)
    if checkpoint.saved is not None:
        from streaming.sharded import saved_options

        options = saved_options(checkpoint.saved, options)
    config = parse_config(checkpoint.config)
    dtype = resolve_dtype(options.dtype, config, checkpoint)
    check_length(options.max_model_len, config)
    tied = config.tie_word_embeddings and not _has_both(checkpoint, config)
    policy, notes = _policy(checkpoint, config, options, tied=tied)
    specs = layer_specs(config, dtype=dtype, policy=policy, tied=tied)
    if checkpoint.saved is not None:
        from streaming.sharded import saved_specs

        specs = saved_specs(checkpoint.root, checkpoint.saved, specs)
    plan = _plan(checkpoint, specs, config, options, tied=tied, topology=topology, every_rank=every_rank)
    plan = replace(plan, warnings=(*plan.warnings, *notes), topology=topology)
    if options.moe_load == "routed_first":
        from streaming.expert_plan import with_experts_apart

        plan = with_experts_apart(plan, options)
    cache_dtype, kv_scales = options.kv_cache_dtype, None
    if cache_dtype != "auto":
        _check_cache_form(config, cache_dtype)
        from streaming.kv_scales import cache_scales

        plan, kv_scales = cache_scales(plan, checkpoint, cache_dtype=cache_dtype, num_layers=config.num_layers)
    reading = choose_reading(checkpoint, plan, options)
    budget_of = partial(_budget, reading=reading, options=options, config=local_config(config, topology), dtype=dtype)
    limit = memory_limit(options)
    host = host_limit(options) if options.is_on_gpu else None
    whole = plan
    plan, budget = within(
        plan, limit, budget_of=budget_of, options=options, topology=topology, host_limit_nbytes=host
    )  # fmt: skip
    if options.cache_dir is not None and plan.stream is None:
        note = f"--cache-dir {options.cache_dir}: all weights stay in memory, so nothing is kept there"
        plan = replace(plan, warnings=(*plan.warnings, note))
    keep_maps = reading.strategy == "lazy" and options.device == "cpu" and plan.stream is None
    read_plan = plan_reads(plan, window_nbytes=options.window_nbytes or budget.window_nbytes, keep_maps=keep_maps)
    read_plan = replace(read_plan, states=planned_states(read_plan, reading, checkpoint.states))
    retie = config.tie_word_embeddings and not tied and plan.stream is None
    return Prepared(
        options, checkpoint, config, dtype, plan.specs or specs, plan, budget, read_plan, retie, reading, kv_scales,
        topology=topology, model=model, whole=whole, budget_of=budget_of, host_limit_nbytes=host,
    )  # fmt: skip


def memory_limit(options: LoadOptions) -> int | None:
    """Bytes that the load may take; None where nothing was said. Raises OptionError where "auto" cannot know."""
    flag, value = options.memory_limit
    if value != "auto":
        return options.memory_nbytes
    if options.is_on_gpu:
        from streaming.gpu_free_memory import free_gpu_nbytes

        return int(free_gpu_nbytes(options.device, flag=flag) * AUTO_SHARE)
    from streaming.available_memory import available_nbytes

    found = available_nbytes()
    if found is None:
        raise OptionError(f"{flag} auto: this system does not say how much memory is free; give a size")
    return int(found * AUTO_SHARE)


def host_limit(options: LoadOptions) -> int | None:
    """Bytes of the host's memory that a load to a GPU may take: what is free, where nothing else was said; None where
    nobody knows. Raises OptionError where that was asked for."""
    if options.host_nbytes is not None:
        return options.host_nbytes
    from streaming.available_memory import available_nbytes

    found = available_nbytes()
    if found is None and options.host_memory == "auto":
        raise OptionError("--host-memory auto: this system does not say how much memory is free; give a size")
    return None if found is None else int(found * AUTO_SHARE)


def within(
    plan: LoadPlan,
    limit: int | None,
    *,
    budget_of: BudgetOf,
    options: LoadOptions,
    topology: Topology,
    host_limit_nbytes: int | None,
    ring_nbytes: int | None = None,
    experts_stay: bool = False,
    caches_nbytes: int | None = None,
) -> tuple[LoadPlan, Budget]:
    """The plan, with what does not fit into the limit streamed, and its budget. Raises BudgetError where that is not
    possible either.

    Of a model that is loaded: `ring_nbytes`: of its ring, if it has one; `experts_stay`: they are in memory, all of
    them; `caches_nbytes`: of the KV caches that are in use.
    """
    caches = caches_nbytes or 0
    tokens = DEFAULT_CACHE_TOKENS if caches_nbytes is None else STREAMED_CACHE_TOKENS
    budget = budget_of(plan, cache_tokens=tokens, caches_nbytes=caches)
    if limit is None or budget.peak_nbytes + (ring_nbytes or 0) <= limit:
        if options.host_memory is not None and host_limit_nbytes is not None and budget.host_nbytes > host_limit_nbytes:
            raise host_too_small(budget, limit_nbytes=host_limit_nbytes)
        return plan, replace(budget, limit_nbytes=limit, ring_nbytes=ring_nbytes or 0)
    from streaming.stream_budget import stream_within, why_not_streamed

    if (why := why_not_streamed(options, topology)) is not None:
        raise too_small(plan, replace(budget, limit_nbytes=limit), more=f"; {why}")
    if not plan.experts and not experts_stay:
        from streaming.expert_plan import is_of_experts, with_experts_apart

        if any(is_of_experts(param) for layer in plan.layers for param in layer.spec.params):
            plan = with_experts_apart(plan, options)
    return stream_within(
        plan, limit_nbytes=limit, given_ring_nbytes=ring_nbytes, host_limit_nbytes=host_limit_nbytes,
        budget_of=partial(budget_of, cache_tokens=STREAMED_CACHE_TOKENS, caches_nbytes=caches),
    )  # fmt: skip


def budget_within(
    prepared: Prepared, limit: int, *, ring_nbytes: int | None, caches_nbytes: int
) -> tuple[LoadPlan, Budget]:
    """`within` another limit, for a model that is loaded, and may have a ring. Raises BudgetError."""
    assert prepared.budget_of is not None
    return within(
        prepared.whole or prepared.plan, limit, budget_of=prepared.budget_of, options=prepared.options,
        topology=prepared.topology, host_limit_nbytes=prepared.host_limit_nbytes, ring_nbytes=ring_nbytes,
        experts_stay=prepared.budget.experts_nbytes == 0, caches_nbytes=caches_nbytes,
    )  # fmt: skip


class BudgetOf(Protocol):
    """The budget of a plan, whatever the limit; `cache_tokens` are set aside where nobody says how many are needed."""

    def __call__(self, plan: LoadPlan, *, cache_tokens: int = ..., caches_nbytes: int = ...) -> Budget:
        """`caches_nbytes`: of caches, where those that are in use take more."""
        ...


def _budget(
    plan: LoadPlan,
    *,
    reading: ReadChoice,
    options: LoadOptions,
    config: ModelConfig,
    dtype: DType,
    cache_tokens: int = DEFAULT_CACHE_TOKENS,
    caches_nbytes: int = 0,
) -> Budget:
    """This rank's; `config` has the heads and layers that are its own."""
    tokens = options.max_model_len or min(cache_tokens, config.max_position_embeddings)
    kept = options.kv_cache_dtype
    cache = kv_cache_nbytes(config, max_tokens=tokens, dtype=dtype, cache_dtype=kept)
    room = cache_room_nbytes(config, max_tokens=tokens, dtype=dtype, cache_dtype=kept)
    return make_budget(
        plan,
        file_nbytes=reader_nbytes(plan, reading),
        window_nbytes=options.window_nbytes,
        cache_nbytes=max(cache + room, caches_nbytes),
        packs=options.kernels == "fast",
        device=options.device,
        flag=options.memory_limit[0],
    )


def _check_cache_form(config: ModelConfig, cache_dtype: str) -> None:
    try:
        check_cache_form(config, cache_dtype)
    except ValueError as error:
        raise OptionError(f"--kv-cache-dtype {cache_dtype}: {error}") from None


def _policy(
    checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, *, tied: bool
) -> tuple[SchemeChoice, tuple[str, ...]]:
    """The scheme of each parameter, and warnings. Raises OptionError for rules that tear a fused weight apart."""
    if checkpoint.saved is not None:
        from streaming.sharded import saved_policy

        return saved_policy(checkpoint.saved), ()
    default = default_policy(options.default_scheme, quantize_head=options.quantize_head)
    rules = options.quantization_rules
    if rules is None:
        return default, ()
    from streaming.quantization_config import module_policy, unmatched_warnings

    policy = module_policy(
        rules, default=default, config=config, weight_map=weight_map(config), tied=tied, tensors=checkpoint.tensors
    )
    return policy, unmatched_warnings(policy)


def open_model(model: str, options: LoadOptions, *, rank: int = 0) -> Checkpoint:
    """The model's files, and those of its other sources, as one checkpoint; of saved shards those of one rank. Raises
    CheckpointError, OptionError."""
    checkpoint = open_checkpoint(
        model, load_format=options.load_format, revision=options.revision, remote_cache=options.remote_cache
    )
    if checkpoint.saved is not None:
        from streaming.sharded import rank_checkpoint

        checkpoint = rank_checkpoint(checkpoint, options.topology(rank))
    joined = join_sources(checkpoint, options.sources)
    check_names(joined)
    return joined


def _has_both(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether embedding and head are there each by itself."""
    if checkpoint.saved is not None:
        return not checkpoint.saved["tied"]
    return holds_both_tied(checkpoint.tensors, weight_map(config))


def _plan(
    checkpoint: Checkpoint,
    specs: tuple[LayerSpec, ...],
    config: ModelConfig,
    options: LoadOptions,
    *,
    tied: bool,
    topology: Topology,
    every_rank: bool,
) -> LoadPlan:
    direct, cut, share = options.device == "cpu", None, None
    if not topology.is_single:
        from layers.cuts import cut_specs  # with all that schemes need of each other: a run of one rank does without

        cut = partial(cut_specs, config=config, topology=topology)
    if options.read_sharing != "none":
        from streaming.shared_reads import check_sharing, share_reads

        check_sharing(checkpoint, options)
        share = partial(share_reads, config=config, topology=topology)
    if checkpoint.saved is not None:
        from streaming.sharded_plan import make_stored_plan

        return make_stored_plan(checkpoint, specs if cut is None else cut(specs), direct=direct)
    survey = None
    if every_rank:
        from streaming.rank_shares import rank_shares

        survey = partial(rank_shares, config=config, topology=topology)
    names = weight_map(config)
    if checkpoint.format == "dummy":
        from streaming.dummy import own_names

        names = own_names(names)
    return make_plan(
        checkpoint, specs, names, tied=tied, direct=direct, read=read_tensor,
        strict=options.loader.weights_track, unwrap=options.unwrap_names, method=disk_method(checkpoint),
        cut=cut, share=share, survey=survey,
    )  # fmt: skip


def resolve_dtype(asked: str, config: ModelConfig, checkpoint: Checkpoint) -> DType:
    """The dtype of the shell: as saved, as asked, the config's, else the most frequent float dtype of what is used."""
    if checkpoint.saved is not None:
        return next(dtype for dtype in DType if dtype.torch_name == checkpoint.saved["dtype"])
    if (named := DTYPES[asked]) is not None:
        return named
    if config.dtype is not None:
        return config.dtype
    found: Counter[DType] = Counter()
    names = NameLookup(weight_map(config))
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype.is_wide and not isinstance(names.locate(name), Dropped):
            found[DType.BF16 if tensor.encoding else tensor.dtype] += tensor.numel
    return found.most_common(1)[0][0] if found else DType.BF16


def check_remote_options(options: LoadOptions) -> None:
    """Refuse what says how local files are read."""
    if options.reader != "process":
        raise OptionError(
            f"--reader {options.reader} reads local files; a remote model is read by a process of its own"
        )
    if options.safetensors_load_strategy is not None:
        raise OptionError(
            f"--safetensors-load-strategy {options.safetensors_load_strategy} is a way to read local files; leave it "
            "out for a remote model"
        )


def check_length(max_model_len: int | None, config: ModelConfig) -> None:
    """Refuse a context longer than the model's positions."""
    if max_model_len is not None and max_model_len > config.max_position_embeddings:
        raise OptionError(
            f"--max-model-len {max_model_len} is more than the model's max_position_embeddings "
            f"({config.max_position_embeddings})"
        )


def read_tensor(tensor: TensorInfo) -> bytes:
    """All bytes of one (small) tensor."""
    from streaming.file_ranges import open_ranges

    with closing(open_ranges(tensor.file)) as ranges:
        (data,) = ranges.read([(tensor.offset, tensor.nbytes)])
    return bytes(data)
