"""Answer rows in an object store by `tasc generate`: python examples/object_store.py s3://bucket/demo"""

import subprocess
import sys
from pathlib import Path

from pyarrow import Table, fs, parquet

from tasc_jobs.demo.tasks import ADAPTERS, MODEL, read_split


def tasc(*arguments: str | Path) -> None:
    subprocess.run([Path(sys.executable).with_name("tasc"), *arguments], check=True)


url = sys.argv[1]
store, folder = fs.FileSystem.from_uri(url)
rows = Table.from_pylist(read_split("massive_en", "test")[:300])
parquet.write_table(rows, f"{folder}/rows/massive.parquet", filesystem=store)
model = ("--model", MODEL, "--adapter", ADAPTERS / "massive_en")
tasc("task", "create", "intents", *model, "--template", "intent and slots: {input}\n", "--replace")
tasc("generate", "intents", "--input", f"{url}/rows/", "--output", f"{url}/answers/")
# Files whose names begin with _ are skipped.
answers = parquet.read_table(f"{folder}/answers", filesystem=store)
print(answers.num_rows, "answers, such as", answers["text"][0])
