"""How much of my model's loss could any model avoid?

Nobody knows the entropy of text. The entropy of a grammar is exact, so the loss splits into two parts: the entropy,
which no model can avoid, and the KL divergence of the model from the true probabilities.
"""

from isoloss import evaluate, load_language, pretrain
from isoloss.run_config import ModelConfig, TrainConfig

language = load_language("pcfg-laptop")
print(language)
sentences = language.sample(2)
for tokens, length in zip(sentences.tokens, sentences.lengths, strict=True):
    print(" ".join(language.vocabulary[int(token)] for token in tokens[:length]))

config = TrainConfig(
    language=language.config,
    model=ModelConfig(size="d16"),
    steps=300,
    batch_size=32,
    checkpoints=(0, 100),
    device="cpu",
    threads=1,
)
pretrain("run", config, language=language)  # the same call resumes

print("\nstep  KL to the truth   entropy   loss (nats per masked token)")
for evaluation in evaluate("run", "loss", settings={"loss_sentences": 256}):
    kl, entropy, loss = (evaluation.estimates[name] for name in ("kl", "entropy", "loss"))
    print(f"{evaluation.step:4}  {kl.value:.3f} ± {kl.stderr:.3f}     {entropy.value:.3f}     {loss.value:.3f}")
