"""Print an answer while it is made; a piece may have several tokens."""

from tasc_jobs.demo.tasks import ADAPTERS, MODEL
from tasc_serve import LLM

llm = LLM(MODEL, adapter=ADAPTERS / "massive_en", template="intent and slots: {input}\n")
for piece in llm.stream("set an alarm for two hours from now"):
    print(piece, end="", flush=True)
print()
