"""How far is my model from the truth, apart from what nobody can predict?

On text nobody knows the entropy. On a grammar it is exact, so the loss splits into the entropy and the KL divergence.
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
