"""How does flatness change while my Trainer runs?

A callback measures the trace every 20 steps, with its error. It does not change training, bit for bit.
"""

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from isoloss.flatness import FlatnessCallback

text = "".join(topics.values()).encode("ascii", "ignore")  # the language reference of Python, by character
rows = [torch.tensor(list(text[start : start + 64])) for start in range(0, 64 * 640, 64)]
training, held_out = rows[:512], torch.stack(rows[512:])
batches = [{"input_ids": held_out, "labels": held_out}]

torch.manual_seed(0)
config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
callback = FlatnessCallback(batches, every=20)
arguments = TrainingArguments(
    output_dir="trained", max_steps=100, learning_rate=3e-3, per_device_train_batch_size=16, logging_steps=20,
    save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, seed=0,
)  # fmt: skip
dataset = [{"input_ids": row, "labels": row} for row in training]
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset, callbacks=[callback])
trainer.remove_callback(next(type(c) for c in trainer.callback_handler.callbacks if "Print" in type(c).__name__))
trainer.train()

losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
print("step  training loss    trace")
for step, trace in callback.traces.items():
    print(f"{step:4}  {losses[step]:13.3f}    {trace}")
