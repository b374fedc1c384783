"""Compiles what most tests run, before the first of them, so that no two processes compile it."""

import subprocess
import sys
import tempfile
from pathlib import Path

_PARTS = ("draft", "engine")


def compile_all() -> None:
    """Fill numba's caches, a process for each part; a second or two where they are filled."""
    commands = [[sys.executable, __file__, part] for part in _PARTS]
    running = [subprocess.Popen(command) for command in commands]
    for process in running:
        if process.wait() != 0:
            raise RuntimeError(f"{' '.join(map(str, process.args))} failed; its error is above")


def _draft() -> None:
    import numpy as np

    from tasc_draft import DraftSettings, NgramProposer, Tokens, build_index

    texts = Tokens.of([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 5, 6], [2, 3, 4]])
    index = build_index(texts, texts, fingerprint="f", vocab_size=9, eos_id=8)
    for mixture in ("mixed", "tasc", "trie"):
        settings = DraftSettings(mixture=mixture, min_prob=0.0)
        proposer = NgramProposer(
            settings, rows=2, capacity=64, vocab_size=9, eos_ids=(8,), index=index
        )
        proposer.start(0, np.array([1, 2, 3], np.int32))
        for _ in range(2):
            proposer.propose(np.array([0], np.int32), np.array([8], np.int32))
            proposer.observe(0, np.array([4, 5], np.int32))
        proposer.finish(0)


def _engine() -> None:
    import torch

    import tiny
    from lossless.lossless_cases import answer, make_case
    from tasc_engine import GenerationRequest, Sampling

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(Path(folder), "qwen2")
        asked = [GenerationRequest("0", case.prompts[2], 8)]
        asked += [GenerationRequest("1", case.prompts[3], 8, sampling=Sampling(temperature=1.0))]
        answer(case, requests=asked)
    assert tiny


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    {"draft": _draft, "engine": _engine}[sys.argv[1]]()
