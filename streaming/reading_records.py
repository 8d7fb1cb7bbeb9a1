"""What a reader's program says to the process that started it, byte for byte. [no-torch]"""

from __future__ import annotations

import struct

RECORD = struct.Struct("<iidd")  # piece, errno (0 = done, or below 0), start and end on the monotonic clock
COUNT = struct.Struct("<Q")  # the other way: how many window items have been released in all
SHORT = -1  # the file ended within the piece
