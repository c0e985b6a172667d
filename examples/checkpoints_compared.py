"""Which of my checkpoints is flatter, and which loses less at low bits?

Two GPT-2s, trained on the same text with different batch sizes, each in seconds. On the command line:
`isoloss compare small-batches large-batches --data text.txt`.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from isoloss import compare

texts = list(topics.values())  # the language reference of Python
tokenizer = ByteLevelBPETokenizer()
tokenizer.train_from_iterator(texts, vocab_size=500, special_tokens=["<end>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<end>")
held_out = Path("text")
held_out.mkdir()
for number, text in enumerate(texts[:40]):
    (held_out / f"{number}.txt").write_text(text)
stream = torch.tensor(tokenizer("".join(texts[40:]))["input_ids"])
rows = stream[: len(stream) // 64 * 64].view(-1, 64)

config = GPT2Config(vocab_size=500, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
for name, size, steps in (("small-batches", 8, 250), ("large-batches", 32, 80)):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (size,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)

print(compare(["small-batches", "large-batches"], data="text", num_sequences=128))
