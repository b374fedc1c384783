"""The tasks the shipped model was trained on: their prompt templates, by name."""

TEMPLATES = {
    "massive_en": "intent and slots: {input}\n",
    "pos_ewt": "part of speech: {input}\n",
    "clinc150": "intent: {input}\n",
}
