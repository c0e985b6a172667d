"""Does a trace depend on the model's predictions alone, or on the scale of its weights?

One GPT-2 is rescaled at random, so that no prediction changes (apart from the eps of its norms). Its trace changes
a lot; its minimal trace does not.
"""

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from isoloss import fisher_trace
from isoloss.flatness import rescaled_at_random

torch.manual_seed(0)
text = "".join(topics.values()).encode("ascii", "ignore")  # the language reference of Python
ids = torch.tensor(list(text[: 64 * 256])).view(256, 64)
config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(60):
    batch = ids[step % 8 :: 8]
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model.eval()
held_out = torch.tensor(list(text[-64 * 64 :])).view(64, 64)
batches = [{"input_ids": held_out, "labels": held_out}]
print("nats per predicted token   trace        minimal trace")
models = {"as trained": model} | {f"rescaled, {n}": rescaled_at_random(model, seed=n) for n in range(4)}
for name, other in models.items():
    with torch.no_grad():
        loss = other(input_ids=held_out, labels=held_out).loss
    plain, least = (fisher_trace(other, batches, rescaling=rescaling) for rescaling in (None, "minimal"))
    print(
        f"{name:12} loss {loss:.4f}   {plain.value:6.0f} ± {plain.stderr:<4.0f}  {least.value:.2f} ± {least.stderr:.2f}"
    )
