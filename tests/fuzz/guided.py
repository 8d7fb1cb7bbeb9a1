"""Coverage-guided fuzzing of one parser by atheris: `python -m tests.fuzz.guided safetensors 120` (seconds).

Needs `pip install atheris` and nothing else of the project's dependencies. A crash, a hang of more than ten seconds or
too much memory ends the run with the file that caused it; the last lines tell how many files were tried.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def main(name: str, seconds: str) -> None:
    """Fuzz one parser for so long."""
    import atheris

    with atheris.instrument_imports(include=["layers", "quant", "streaming", "tests.fuzz", "json"]):
        from tests.fuzz.parsers import PARSERS, run_target
    parser = PARSERS[name]
    shared = "/dev/shm"
    folder = Path(tempfile.mkdtemp(dir=shared if Path(shared).is_dir() else None))
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(parser.seeds):
        (corpus / f"seed{number}").write_bytes(seed)

    def try_file(content: bytes) -> None:
        run_target(parser, content, folder)

    limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=1024", "-max_len=16384"]
    atheris.Setup([sys.argv[0], str(corpus), f"-artifact_prefix={folder}/", "-print_final_stats=1", *limits], try_file)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
