"""A family of tiny models in a hub's cache, and a text, for suites that are measured offline."""

from pathlib import Path

import torch

from small_checkpoints import byte_level, documents, gpt2

SEEDS, STEPS = (0, 1), (1, 2, 10)


def family(home: Path, seeds=SEEDS, steps=STEPS) -> None:
    """Write `lab/tiny-seedN@stepM` into the cache of a hub below `home`."""
    tokenizer = byte_level()
    for seed in seeds:
        start, end = gpt2(len(tokenizer), seed=seed), gpt2(len(tokenizer), seed=seed + 100)
        cache = home / "hub" / f"models--lab--tiny-seed{seed}"
        (cache / "refs").mkdir(parents=True)
        for step in steps:
            model = gpt2(len(tokenizer), seed=seed)
            with torch.no_grad():
                for value, first, last in zip(*(each.parameters() for each in (model, start, end)), strict=True):
                    value.copy_(first + (last - first) * 0.05 * step)
            commit = f"{seed:020d}{step:020d}"
            model.save_pretrained(cache / "snapshots" / commit)
            tokenizer.save_pretrained(cache / "snapshots" / commit)
            (cache / "refs" / f"step{step}").write_text(commit)


def text_in(folder: Path) -> Path:
    """Write thirty documents into a folder, and return it."""
    folder.mkdir(parents=True)
    for number, document in enumerate(documents()):
        (folder / f"{number}.txt").write_text(document)
    return folder
