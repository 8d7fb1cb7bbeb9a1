"""Streamed units that the forward pass uses by itself where they lie in their files, while all of them lie there.

Once a pass has found every unit in the page cache, nothing is left to bring. What threads would still do for each of
them (look for it, set up its pages, tell, take the pages away) costs the forward pass more than the pages that it sets
up itself, by touching them: whenever a product ends it finds a core and the interpreter taken (measured: without them a
token takes 0.88 of the time).
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence

import torch

from streaming.file_views import FileViews, go_together
from streaming.stream_plan import Unit
from streaming.unit_memory import Place


class UnitsInPlace:
    """`use` is the forward thread's. Whoever calls holds the stream's lock."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._first = ""  # unit of a pass
        self._faults = 0
        self._room_nbytes = self._mapped_nbytes = 0
        self._mapped: list[FileViews] = []  # that have been used, and have their pages yet

    @property
    def is_on(self) -> bool:
        """Whether all units that pass through are used where they lie, and none is to be brought."""
        return bool(self._places)

    def begin(self, units: Sequence[Unit], viewed: Mapping[str, FileViews], *, room_nbytes: int) -> bool:
        """Use these units, all that pass through, where they lie, if each was viewed the last time and still can be:
        whether that is so. Those that have their pages at once are `room_nbytes` at the most, or one."""
        found = [(unit, views) for unit in units if (views := viewed.get(unit.name)) and views.may_be_used]
        if not found or len(found) < len(units):
            return False
        for unit, views in found:
            place = self._places[unit.name] = Place(torch.empty(0, dtype=torch.uint8), unit.storage)
            place.take_views(views)
        self._first, self._faults, self._room_nbytes = units[0].name, _faults(), room_nbytes
        return True

    def use(self, unit: Unit) -> Place | None:
        """The unit's place, for one product; None where units have to be brought again, this one to begin with: its
        file was opened for writing, or the system has dropped what lies there, which shows by pages that were read from
        a disk in the last pass."""
        place = self._places.get(unit.name)
        if place is None or place.views is None or not place.views.may_be_used or self._was_dropped(unit):
            self.end()
            return None
        if self._mapped_nbytes + unit.nbytes > self._room_nbytes:
            self._take_pages_away()
        self._mapped.append(place.views)
        self._mapped_nbytes += unit.nbytes
        return place

    def end(self) -> None:
        """Units have to be brought again; none is in use."""
        self._places.clear()
        self._take_pages_away()

    def _was_dropped(self, unit: Unit) -> bool:
        return unit.name == self._first and _faults() != self._faults

    def _take_pages_away(self) -> None:
        go_together(view for views in self._mapped for view in views.all)
        self._mapped.clear()
        self._mapped_nbytes = 0


def _faults() -> int:
    """Times that this process has waited for a page of a file."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
