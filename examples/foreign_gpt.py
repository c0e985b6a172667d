"""How flat is my own nn.Module, which transformers does not know?

`my_gpt.py` has the model (QK-norm, squared ReLU, soft-capped logits) and says which of its weights may be rescaled.
On the command line: `isoloss measure steps-200.pt --module my_gpt.py:build --data ids.npy`.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from my_gpt import LENGTH, VOCABULARY, build

from isoloss import fisher_trace, load_model
from isoloss.flatness import check_rescaling, rescaled_at_random, rescalings_of

text = "".join(topics.values()).lower().encode("ascii", "ignore")
ids = torch.tensor(list(text[: 320 * LENGTH])).remainder(VOCABULARY).view(320, LENGTH)  # characters share ids
training, held_out = ids[:256], ids[256:]

model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(200):
    if step % 100 == 0 or step == 199:
        torch.save({"model": model.state_dict()}, f"steps-{step + 1}.pt")
    batch = training[step % 8 :: 8]
    torch.nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()

batches = [{"input_ids": held_out, "labels": held_out}]
module = f"{Path(__file__).with_name('my_gpt.py')}:build"
print("weights       trace       minimal trace (nats per predicted token)")
for weights in ("steps-1.pt", "steps-101.pt", "steps-200.pt"):
    loaded = load_model(weights, module=module).model
    plain, least = (fisher_trace(loaded, batches, causal=True, rescaling=which) for which in (None, "minimal"))
    print(f"{weights:12}  {plain.value:.1f} ± {plain.stderr:.1f}  {least.value:.2f} ± {least.stderr:.2f}")

other = rescaled_at_random(loaded, seed=1)
plain, least = (fisher_trace(other, batches, causal=True, rescaling=which) for which in (None, "minimal"))
print(f"rescaled      {plain.value:.1f} ± {plain.stderr:.1f}  {least.value:.2f} ± {least.stderr:.2f}")
change = check_rescaling(loaded, rescalings_of(loaded), batches[0])
print(f"largest change of a log-probability under random factors, in float64: {change:.0e} nats")
