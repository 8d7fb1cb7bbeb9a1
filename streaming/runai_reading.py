"""Bytes by way of Run:ai's model streamer (`--load-format runai_streamer`): its threads read ranges into its buffers.

The package (pip install runai-model-streamer, 0.17 or newer) takes any ranges of any files and gives each back in a
buffer of its own as it comes; from there they are copied to their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streaming.back_end_reading import Fetch, Wanted, main


def open_fetch(regions: Sequence[memoryview]) -> Fetch:
    """A streamer that lives as long as the process. Raises ImportError without the package."""
    from runai_model_streamer import FileChunks, FileStreamer

    streamer = FileStreamer().__enter__()

    def fetch(batch: Sequence[Wanted]) -> Iterator[int]:
        by_path: dict[str, list[Wanted]] = {}
        for wanted in batch:
            by_path.setdefault(wanted.path, []).append(wanted)
        groups = list(by_path.items())
        streamer.stream_files(
            [
                FileChunks(number, path, [each.offset for each in group], [each.nbytes for each in group])
                for number, (path, group) in enumerate(groups)
            ]
        )
        for number, place, found in streamer.get_chunks():
            wanted = groups[number][1][place]
            regions[wanted.region][wanted.dest : wanted.dest + wanted.nbytes] = memoryview(found.view(-1).numpy())
            yield wanted.index

    return fetch


if __name__ == "__main__":
    main(open_fetch)
