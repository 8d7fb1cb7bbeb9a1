"""The file system of a path, by the longest mount point that holds it (lines as proc(5) describes them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming.available_memory import available_nbytes
from streaming.mount_table import file_system_of, find_mount

TABLE = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /models rw master:5 propagate_from:2 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /models/local rw - xfs /dev/sdb1 rw
32 22 0:42 / /with\\040space rw - lustre mgs@tcp:/fs rw
33 22 0:43 / /twice rw - ext4 /dev/sdc1 rw
34 22 0:44 / /twice rw - cifs //host/share rw
not a line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"), ("/models", "nfs4"), ("/models/a/b", "nfs4"), ("/modelsx", "ext4"),
        ("/models/local/a", "xfs"), ("/models/localx", "nfs4"), ("/with space/a", "lustre"), ("/twice/a", "cifs"),
    ],
)  # fmt: skip
def test_the_longest_mount_point_decides(path: str, kind: str) -> None:
    assert find_mount(path, TABLE) == kind


def test_a_link_is_followed_to_where_it_leads(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    (tmp_path / "net").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "net")
    table.write_text(f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path.resolve()}/net rw - nfs b rw\n")
    assert file_system_of(tmp_path / "link" / "model", table=table) == "nfs"
    assert file_system_of(tmp_path, table=tmp_path / "none") is None


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:    4000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_group_the_machines_memory_counts(tmp_path: Path) -> None:
    assert available_nbytes(root=machine(tmp_path, {})) == 4000 << 10


def test_the_tightest_group_on_the_way_up_limits_it_and_its_file_pages_count_as_free(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "10\n",
        "sys/fs/cgroup/outer/memory.max": "1000000\n",
        "sys/fs/cgroup/outer/memory.current": "400000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 5\ninactive_file 100\nactive_file 23\n",
    }
    assert available_nbytes(root=machine(tmp_path, group)) == 600123


def test_a_group_of_the_first_version_limits_it_too(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "5:cpu,memory:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "3000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1000\n",
    }
    assert available_nbytes(root=machine(tmp_path, group)) == 2000


def test_a_system_that_tells_nothing_gives_nothing(tmp_path: Path) -> None:
    assert available_nbytes(root=tmp_path) is None
