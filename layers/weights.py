"""What a parameter is, where its numbers come from in a checkpoint, and which layer it belongs to: all of it data.

`ParamSpec` describes one parameter of the shell. A linear weight may be fused from *sections* (q, k, v), each a run of
rows that comes from a checkpoint tensor of its own. `WeightMap` says what a checkpoint's tensor is called here. The
plan joins the two from file headers alone; nothing here imports torch.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING

from layers.errors import WeightError
from layers.fused_experts import ExpertRule
from quant.disk_forms.form import DiskForm
from quant.dtypes import DType
from quant.scheme import Scheme, StoredSpec

if TYPE_CHECKING:
    from quant.section_cuts import SectionCut


class ParamKind(Enum):
    """What a parameter is for, which decides how it may be kept."""

    LINEAR = "linear"  # a projection inside a layer: quantized when a scheme is asked for
    ROUTER = "router"  # what chooses and weighs experts, wide
    ABSORBED = "absorbed"  # multiplied from both sides (layers.mla): kept wide, even where it is quantized on disk
    HEAD = "head"  # the output projection: quantized only when that is asked for by name
    EMBEDDING = "embedding"  # looked up by row, wide
    POSITIONS = "positions"  # the table of learned positions, wide
    NORM = "norm"  # wide
    BIAS = "bias"  # wide
    SINK = "sink"  # a score of each head, wide

    @cached_property
    def has_scheme(self) -> bool:
        """Whether such a weight is kept and multiplied by its scheme, "none" too; others are plain wide tensors."""
        return self in (ParamKind.LINEAR, ParamKind.HEAD)


class Split(Enum):
    """How a parameter is cut over the ranks that share a layer (tensor parallelism)."""

    WHOLE = "whole"  # on every rank: norms, routers, down-projections to latents
    ROWS = "rows"  # outputs, each section by itself: column-parallel weights and what goes with their outputs
    COLUMNS = "columns"  # inputs: row-parallel weights, whose products are parts of a sum
    ONCE = "once"  # whole on the first rank alone: what is added to such a sum
    VOCABULARY = "vocabulary"  # rows, padded to a multiple of 64 for each rank: embedding table and head


@dataclass(frozen=True)
class Sharding:
    """How a parameter is cut, as data. `units`: how many heads each section is (rows are cut between heads; where a
    section has fewer heads than there are ranks, each head is on several ranks); () where any row may begin a part.
    `experts`: how many experts the sections are of; with expert parallelism they go to ranks whole, and `split` is for
    tensor parallelism alone."""

    split: Split = Split.WHOLE
    units: tuple[int, ...] = ()
    experts: int = 0


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a section of the uncut parameter: what one section of a rank's own is."""

    section: int
    start: int
    stop: int


@dataclass(frozen=True)
class ParamCut:
    """What of the uncut parameter `whole` a rank has: for each of its own sections a part, and of all of those the
    columns [first, stop) (None: all). The edges are where any rank's part begins or ends: of rows for each part."""

    whole: ParamSpec
    parts: tuple[Part, ...]
    columns: tuple[int, int] | None = None
    row_edges: tuple[tuple[int, ...], ...] = ()
    column_edges: tuple[int, ...] = ()

    @cached_property
    def is_within(self) -> bool:
        """Whether sections, or rows, are cut: else the rank has whole sections."""
        rows = self.whole.section_rows
        parts = any((part.start, part.stop) != (0, rows[part.section]) for part in self.parts)
        return self.columns is not None or parts

    def section_cut(self, index: int) -> SectionCut:
        """How the section that part `index` is of is cut."""
        from quant.section_cuts import SectionCut  # with all schemes: planning for one rank does without

        part = self.parts[index]
        rows, edges = self.whole.section_rows[part.section], self.row_edges[index] if self.row_edges else ()
        return SectionCut(
            rows, self.whole.shape[1], (part.start, part.stop), self.column_range, edges, self.column_edges
        )

    @property
    def column_range(self) -> tuple[int, int]:
        """The columns, whichever they are."""
        return self.columns or (0, self.whole.shape[1])


@dataclass(frozen=True)
class Section:
    """One logical part of a parameter: `rows` of it along dim 0. Its name is "" where the parameter has one part."""

    name: str
    rows: int


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the shell, as the model sees it (shape) and as it is kept (scheme).

    In a checkpoint that is already quantized a weight has `forms`: one for each of its `runs` of sections, which say
    how many sections lie there as one (q, k and v apart: 1, 1, 1; fused: 3); None where a run is wide. Runs without
    forms: so it was kept when it was saved in its stored form.
    """

    name: str
    shape: tuple[int, ...]
    sections: tuple[Section, ...]
    kind: ParamKind
    dtype: DType
    scheme: Scheme
    forms: tuple[DiskForm | None, ...] = ()
    runs: tuple[int, ...] = ()
    sharding: Sharding = Sharding()
    cut: ParamCut | None = None  # a rank's part of it; then `shape`, `sections` and `scheme` are those of the part

    @cached_property
    def section_rows(self) -> tuple[int, ...]:
        """Rows of each section, in order."""
        return tuple(section.rows for section in self.sections)

    @cached_property
    def section_starts(self) -> tuple[int, ...]:
        """The first row of each section, and the number of rows; kept, for experts are hundreds of sections."""
        return tuple(accumulate(self.section_rows, initial=0))

    @cached_property
    def run_starts(self) -> tuple[int, ...]:
        """The first section of each run, and the number of sections."""
        return tuple(accumulate(self.runs, initial=0))

    @cached_property
    def run_rows(self) -> tuple[int, ...]:
        """Rows of each run of sections that lies in the checkpoint as one."""
        starts = [self.section_starts[section] for section in self.run_starts]
        return tuple(stop - start for start, stop in pairwise(starts))

    def run_at(self, section: int) -> int:
        """The run that section `section` is in."""
        return bisect_right(self.run_starts, section) - 1

    def form_at(self, section: int) -> DiskForm | None:
        """The form on disk of the run that section `section` is in; None where it is wide."""
        return self.forms[self.run_at(section)] if self.forms else None

    @property
    def whole(self) -> ParamSpec:
        """The uncut parameter, of which this is a rank's part; itself where it is not cut."""
        return self if self.cut is None else self.cut.whole

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What of the uncut parameter's sections its own are; kept, for experts are hundreds of sections."""
        if self.cut is not None:
            return self.cut.parts
        return tuple(Part(index, 0, section.rows) for index, section in enumerate(self.sections))

    def run_of(self, section: int) -> int:
        """The run of the uncut parameter that one of its own sections is of; 0 where that has no runs."""
        return self.whole.run_at(self.parts[section].section)

    def rows_in_run(self, section: int) -> tuple[int, int]:
        """Its rows of a section, counted from the first row of the section's run in the uncut parameter."""
        part = self.parts[section]
        first = self.whole.offset_in_run(part.section)
        return first + part.start, first + part.stop

    def offset_in_run(self, section: int) -> int:
        """The first row of a section, counted from that of its run."""
        run = self.run_starts[self.run_at(section)]
        return self.section_starts[section] - self.section_starts[run]

    @property
    def is_cut_within(self) -> bool:
        """Whether a rank has parts of sections, or of rows: not whole ones."""
        return self.cut is not None and self.cut.is_within

    @cached_property
    def kept_as_stored(self) -> bool:
        """Whether what the checkpoint holds of it is kept, and not quantized anew."""
        if self.is_cut_within:
            return self.whole.kept_as_stored
        return bool(self.forms) and all(form is not None and form.kept == self.scheme for form in self.forms)

    @cached_property
    def kept_rows(self) -> tuple[int, ...]:
        """Rows of each part that its scheme treats by itself: a section, or a run that is one on disk."""
        if self.is_cut_within:
            return self.section_rows
        return self.run_rows if self.kept_as_stored or (self.runs and not self.forms) else self.section_rows

    @property
    def is_quantized(self) -> bool:
        """Whether it is kept in another form than its wide numbers."""
        return self.kind.has_scheme and self.scheme.name != "none"

    def storage(self) -> dict[str, StoredSpec]:
        """What is kept for it, by name within its module ("weight", "weight_scale", or "bias")."""
        if self.kind.has_scheme:
            return self.scheme.storage(self.kept_rows, self.shape[1], wide=self.dtype)
        return {self.name.rpartition(".")[2]: StoredSpec(self.shape, self.dtype)}

    @cached_property
    def nbytes(self) -> int:
        """Bytes kept for it."""
        return sum(spec.nbytes for spec in self.storage().values())

    @property
    def wide_nbytes(self) -> int:
        """Bytes of its wide form."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerSpec:
    """One step of the decoder: "embed", "layers.0" ... "layers.N-1", "head"."""

    name: str
    params: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes: a parameter, and the run of its sections [first, stop) that the tensor covers.

    `transposed`: a matrix is stored [in, out] there, which is not how parameters are kept.
    """

    param: str
    first: int = 0
    stop: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Dropped:
    """A checkpoint tensor that is not used, and why."""

    reason: str


@dataclass(frozen=True)
class Stacked:
    """A module of the checkpoint that is one section (or a run of them) of a fused parameter: q_proj -> qkv_proj[0].

    Raises WeightError for what is no run of sections.
    """

    source: str
    target: str
    first: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise WeightError(f"{self.source} -> {self.target}: [{self.first}, {self.stop}) is no run of parts")


@dataclass(frozen=True)
class Rename:
    """A part of a name and what stands there instead; None drops the tensor, with the reason."""

    source: str
    target: str | None
    reason: str = ""


RegexRule = tuple[re.Pattern[str], str | None, str]
"""A regular expression, what its first match becomes (None drops the tensor), and the reason."""

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})")


@dataclass(frozen=True)
class WeightMap:
    """How a family's checkpoint names become parameter names: five kinds of rule, in the order of the fields.

    1. `structure`: a leading run of whole modules, "*" for any one of them ("transformer.h.*.attn" ->
       "model.layers.*.self_attn"); the first rule that fits applies.
    2. `renames`: regular expressions, one after the other.
    3. `substrings`, one after the other: the first occurrence is replaced.
    4. `stacked`: the last module of the name is a part of a fused parameter; the first rule that fits applies.
       Within an expert ("...experts.3.up_proj") `experts` is asked first.
    5. `prefixes`, then `suffixes`, of what has come of it; of each, the first that fits applies.

    What no rule touches keeps its name. Besides: tensors under one of the `unused` prefixes (prefix, reason) are
    dropped by their checkpoint name, before any rule; layers from `num_layers` on are dropped (heads that predict
    further tokens are stored so). `transposed`: patterns of the parameters whose checkpoint tensor is [in, out].
    """

    structure: tuple[Rename, ...] = ()
    renames: tuple[RegexRule, ...] = ()
    substrings: tuple[Rename, ...] = ()
    stacked: tuple[Stacked, ...] = ()
    prefixes: tuple[Rename, ...] = ()
    suffixes: tuple[Rename, ...] = ()
    unused: tuple[tuple[str, str], ...] = ()
    num_layers: int | None = None
    transposed: tuple[re.Pattern[str], ...] = ()
    experts: tuple[ExpertRule, ...] = ()
    fused_transposed: bool = False  # tensors of all experts hold each as [in, out]
    fused_interleaved: bool = False  # in them, outputs of an expert's gate and up take turns

    def locate(self, name: str) -> Target | Dropped:
        """Where the checkpoint tensor `name` goes."""
        for prefix, reason in self.unused:
            if name.startswith(prefix):
                return Dropped(reason)
        renamed = self._before_stacking(name)
        if isinstance(renamed, Dropped):
            return renamed
        stacked, first, stop = self._stack(renamed)
        param = self._after_stacking(stacked)
        if isinstance(param, Dropped):
            return param
        layer = _LAYER.match(param)
        if layer and self.num_layers is not None and int(layer[1]) >= self.num_layers:
            return Dropped(f"layer {layer[1]} lies beyond num_hidden_layers = {self.num_layers}")
        return Target(param, first, stop, transposed=any(pattern.search(param) for pattern in self.transposed))

    def rename(self, name: str) -> str:
        """The rename-only view, no stacking and no drops: for modules that a configuration calls as checkpoints do."""
        kept = replace(
            self, structure=_kept(self.structure), renames=tuple(rule for rule in self.renames if rule[1] is not None),
            substrings=_kept(self.substrings), prefixes=_kept(self.prefixes), suffixes=_kept(self.suffixes),
        )  # fmt: skip
        before = kept._before_stacking(name)
        assert isinstance(before, str)
        after = kept._after_stacking(before)
        assert isinstance(after, str)
        return after

    def _before_stacking(self, name: str) -> str | Dropped:
        found = _restructured(name, self.structure)
        if isinstance(found, Dropped):
            return found
        for pattern, replacement, reason in self.renames:
            if pattern.search(found):
                if replacement is None:
                    return Dropped(reason)
                found = pattern.sub(replacement, found, count=1)
        for rule in self.substrings:
            if rule.source in found:
                if rule.target is None:
                    return Dropped(rule.reason)
                found = found.replace(rule.source, rule.target, 1)
        return found

    def _stack(self, name: str) -> tuple[str, int, int]:
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if self.experts and (found := _EXPERT.fullmatch(parent)) is not None:
            expert = int(found[2])
            for one in self.experts:
                if one.source == last:
                    return f"{found[1]}.{one.target}.{leaf}", expert * one.of + one.first, expert * one.of + one.stop
        for rule in self.stacked:
            if rule.source == last:
                return f"{parent}.{rule.target}.{leaf}", rule.first, rule.stop
        return name, 0, 1

    def _after_stacking(self, name: str) -> str | Dropped:
        rule = next((rule for rule in self.prefixes if name.startswith(rule.source)), None)
        if rule is not None:
            if rule.target is None:
                return Dropped(rule.reason)
            name = rule.target + name[len(rule.source) :]
        rule = next((rule for rule in self.suffixes if name.endswith(rule.source)), None)
        if rule is not None:
            if rule.target is None:
                return Dropped(rule.reason)
            name = name[: len(name) - len(rule.source)] + rule.target
        return name


def _kept(rules: Sequence[Rename]) -> tuple[Rename, ...]:
    return tuple(rule for rule in rules if rule.target is not None)


def _restructured(name: str, rules: Sequence[Rename]) -> str | Dropped:
    """The name with its leading modules as the first rule that fits has them."""
    modules = name.split(".") if rules else []
    for rule in rules:
        source = rule.source.split(".")
        if len(source) > len(modules) or any(s not in ("*", m) for s, m in zip(source, modules, strict=False)):
            continue
        if rule.target is None:
            return Dropped(rule.reason)
        starred = iter([m for s, m in zip(source, modules, strict=False) if s == "*"])
        target = [next(starred) if part == "*" else part for part in rule.target.split(".") if part]
        return ".".join([*target, *modules[len(source) :]])
    return name
