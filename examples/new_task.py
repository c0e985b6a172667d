"""How well do my models do on a downstream task that I define?

A task labels the sentences of a language, and a linear probe on frozen features learns the labels.
"""

import torch

from isoloss import TASKS, linear_probe, load_language, load_model, make_task, pretrain
from isoloss.lab.languages.base import Labeling
from isoloss.run_config import ModelConfig, TrainConfig


def likely(language, *, percent):
    """Label the sentences that are more probable than `percent` percent of all: with `likely-50`, the upper half."""
    drawn = language.sample(4096, generator=torch.Generator().manual_seed(0))
    bound = language.log_prob(drawn.tokens, drawn.lengths).quantile(int(percent) / 100)

    def label(sentences):
        return (language.log_prob(sentences.tokens, sentences.lengths) > bound).long()

    return Labeling(classes=("unlikely", "likely"), label=label)


TASKS.register("likely-PERCENT", likely)

language = load_language("pcfg-laptop")
size = ModelConfig(size="d32")
config = TrainConfig(language=language.config, model=size, steps=500, batch_size=64, checkpoints=(0,), threads=1)
pretrain("run", config, language=language)
task = make_task(language, "likely-50", num_train=1024, num_test=1024)
for step in (0, 500):
    model = load_model(f"run/checkpoints/step-{step}").model
    print(f"step {step}: {linear_probe(model, task, solver='convex')}\n")
