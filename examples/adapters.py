"""Two LoRA adapters of one model in memory; each call names the one that answers."""

from tasc_jobs.demo.tasks import ADAPTERS, MODEL
from tasc_serve import LLM

llm = LLM(MODEL, adapters={name: ADAPTERS / name for name in ("massive_en", "pos_ewt")})
tags = llm.generate("part of speech: The dog barks .\n", adapter="pos_ewt", max_tokens=16)
intent = llm.generate("intent and slots: play some jazz\n", adapter="massive_en", max_tokens=64)
print(tags[0].text)
print(intent[0].text)
