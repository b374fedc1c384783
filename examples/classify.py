"""Classify with confidence: the probability of each label, calibrated on rows with labels."""

from tasc_jobs.demo.tasks import ADAPTERS, MODEL, read_split
from tasc_serve import LLM

rows = [(row["input"], row["output"]) for row in read_split("massive_en", "test")[:400]]
labels = sorted({answer.split(",")[0] for _, answer in rows})
prompt = "intent and slots: {input}\n"

llm = LLM(MODEL, adapter=ADAPTERS / "massive_en", template=prompt, choices=labels)
fit = llm.calibrate(rows, end=",")  # the model's answers go on with ", slot fills: ..."
print(f"calibration error: {fit.before.error:.1%} before, {fit.after.error:.1%} after")

for found in llm.classify(["play some jazz", "tell me about it"], abstain_below=0.8):
    best = ", ".join(f"{label} {p:.0%}" for label, p in list(found.probabilities.items())[:3])
    print(f"{found.label} ({best}; others at most {found.unseen_mass:.1%})")
