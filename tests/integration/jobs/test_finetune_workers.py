"""Ray Train workers that share a fine-tune end with the weights of one process alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetuning import make
from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune.checkpoints import FINETUNE, claimed
from tasc_jobs.finetune.distributed import finetune_by
from tasc_jobs.finetune.finetuning import finetune

pytestmark = pytest.mark.ray
SUMS = 1e-4  # two workers add in another order


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow("a group of Ray Train workers")
def test_two_workers_make_what_one_makes(ray_cluster: None, tmp_path: Path) -> None:
    bench = make(tmp_path, "qwen2")
    alone = finetune(bench.job(tmp_path / "alone"))
    told: list[tuple[str, int]] = []
    said: list[str] = []
    refused: list[str] = []
    output = tmp_path / "shared"

    def look(stage: str, done: int, total: int | None) -> None:
        told.append((stage, done))
        try:
            with claimed(output, FINETUNE):
                pass
        except FinetuneError as error:
            refused.append(str(error))

    shared = finetune_by(2, bench.job(output), look, said.append, gpus=False)
    assert any(f"another process is training in {output}; " in error for error in refused)
    assert any("tokens/s" in text for text in said)
    assert shared["steps"] == alone["steps"]
    one, other = weights(tmp_path / "alone"), weights(tmp_path / "shared")
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=SUMS, atol=SUMS)
    assert told
    job = bench.job(tmp_path / "short", max_length=3)
    with pytest.raises(FinetuneError):
        finetune_by(2, job, gpus=False, retries=0)
    assert not job.output.exists()
    held = bench.job(tmp_path / "held")
    with claimed(held.output, FINETUNE), pytest.raises(FinetuneError):
        finetune_by(2, held, gpus=False)
