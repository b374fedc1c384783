"""Answer rows in an object store by `tasc generate`: python examples/object_store.py s3://bucket/demo"""

import subprocess
import sys
from pathlib import Path

from pyarrow import fs, parquet

from tasc_jobs.demo.tasks import ADAPTERS, MODEL, data_file


def tasc(*arguments: str | Path) -> None:
    subprocess.run([Path(sys.executable).with_name("tasc"), *arguments], check=True)


url = sys.argv[1]
fs.copy_files(str(data_file("massive_en", "test")), f"{url}/rows/massive.jsonl.gz")
model = ("--model", MODEL, "--adapter", ADAPTERS / "massive_en")
tasc("task", "create", "intents", *model, "--template", "intent and slots: {input}\n", "--replace")
folders = ("--input", f"{url}/rows/", "--output", f"{url}/answers/")
tasc("generate", "intents", *folders, "--format", "parquet")
store, folder = fs.FileSystem.from_uri(f"{url}/answers")
answers = parquet.read_table(folder, filesystem=store)  # skips files whose names begin with _
print(answers.num_rows, "answers, such as", answers["text"][0])
