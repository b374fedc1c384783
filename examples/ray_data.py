"""Answer and classify the rows of a file by Ray Data, and write them as Parquet files."""

from pathlib import Path

import ray

from tasc_jobs.demo.tasks import ADAPTERS, MODEL, data_file
from tasc_serve import data

engine = {"adapter": ADAPTERS / "massive_en", "template": "intent and slots: {input}\n"}
labels = ["intent: alarm_set", "intent: play_music", "intent: weather_query"]

rows = ray.data.read_json(str(data_file("massive_en", "test"))).limit(64)
answers = data.generate(rows, MODEL, input="input", preserve_order=True, engine=engine)
labelled = data.classify(
    answers, MODEL, labels, input="input", error="why_no_label", end=",", engine=engine
)
folder = str(
    Path("answers").resolve()
)  # the processes of Ray have working directories of their own
labelled.write_parquet(folder)

for row in ray.data.read_parquet(folder).take(3):
    print(f"{row['answer']} ({row['label']} {row['label_probability']:.0%})")
