"""Programs that `bench_counting` times, each in a process of its own: NAME ARGUMENTS...

They import from the checkout that PYTHONPATH names. Each prints one JSON object.
"""

import hashlib
import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def pyarrow(file: str) -> dict[str, Any]:
    """The bigram figures of both sides of a file, in plain pyarrow on one thread."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import json as arrow_json

    pa.set_cpu_count(1)
    options = arrow_json.ReadOptions(use_threads=False, block_size=8 << 20)
    table, found = arrow_json.read_json(file, options), {}
    for side in ("input", "output"):
        words = pc.utf8_split_whitespace(table[side]).combine_chunks()
        flat, row = words.flatten(), pc.list_parent_indices(words)
        bigrams = pc.binary_join_element_wise(flat[:-1], flat[1:], " ")
        within = bigrams.filter(pc.equal(row[:-1], row[1:]))
        counts = np.sort(within.value_counts().field("counts").to_numpy())[::-1]
        p = counts / counts.sum()
        needed = np.searchsorted(5 * np.cumsum(counts), 4 * counts.sum()) + 1
        found[side] = {
            "bigrams": int(counts.sum()),
            "unique_bigrams": len(counts),
            "bigram_entropy_bits": float(-(p * np.log2(p)).sum()),
            "bigrams_for_80_percent": int(needed),
        }
    return found


def job(url: str, few: str, task: str) -> dict[str, Any]:
    """The seconds of the statistics job on a corpus in Redis, and a digest of its figures.

    The workers are started by a job on the corpus ``few``.
    """
    from tasc_jobs.ray_local import local_ray
    from tasc_jobs.statistics.task_statistics import corpus_statistics

    with local_ray(num_cpus=2):
        corpus_statistics(url, few, parallelism=2)
        began = time.perf_counter()
        found = corpus_statistics(url, task)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "digest": _digest(json.dumps(found.as_json).encode())}


def tokenise(url: str, few: str, task: str) -> dict[str, Any]:
    """The seconds of tokenising a corpus in Redis for its index, and a digest of the tokens.

    The workers are started by tokenising the corpus ``few``.
    """
    from tasc_jobs.demo.tasks import demo_record
    from tasc_jobs.index import tokenise as module
    from tasc_jobs.index.redis_source import RedisCorpusSource
    from tasc_jobs.ray_local import local_ray
    from tasc_runtime.progress import silent

    # Older versions read with a limit of their own.
    own = {"batch_rows": module.BATCH_ROWS} if hasattr(module, "BATCH_ROWS") else {}
    first, source = (RedisCorpusSource(url, name, **own) for name in (few, task))
    record = demo_record("massive_en")
    with local_ray(num_cpus=2), tempfile.TemporaryDirectory() as folder:
        module.tokenise(first, record, Path(folder), 2, silent)
        began = time.perf_counter()
        outputs, prompts = module.tokenise(source, record, Path(folder), None, silent)
        seconds = time.perf_counter() - began
        assert prompts is not None
        parts = outputs.ids, outputs.lengths, prompts.ids, prompts.lengths
        return {"seconds": seconds, "digest": _digest(*(part.tobytes() for part in parts))}


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        result = {each.__name__: each for each in (pyarrow, job, tokenise)}[sys.argv[1]](
            *sys.argv[2:]
        )
    print(json.dumps(result))
