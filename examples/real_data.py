"""Pre-train a small BERT on plain text, then probe and fine-tune it on SST-2 and RTE, beside one that is not trained.

    python examples/real_data.py --text openwebtext/ --sst2 glue/SST-2 --rte glue/RTE --output runs/real-data

The folders of the tasks hold train.tsv and dev.tsv. All of it is commands of isoloss, which are printed; stopped at any
moment and started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from tokenizers import BertWordPieceTokenizer

from isoloss.text.documents import read_documents


def learn_vocabulary(text: Path, path: Path, size: int) -> None:
    """Write a WordPiece vocabulary of `size` entries, learned from the documents in `text`, to `path`."""
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    documents = (document for _, document in read_documents([text]))
    tokenizer.train_from_iterator(documents, vocab_size=size, show_progress=False)
    tokenizer.save_model(str(path.parent))  # vocab.txt


def isoloss(*words: object) -> None:
    """Print a command and run it."""
    command = ["isoloss", *map(str, words)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    done = subprocess.run([sys.executable, "-m", *command], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Run the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help=".txt or .jsonl files, or a folder of them")
    parser.add_argument("--sst2", type=Path, required=True, help="folder of SST-2")
    parser.add_argument("--rte", type=Path, required=True, help="folder of RTE")
    parser.add_argument("--output", type=Path, required=True, help="folder for the vocabulary, the run and the results")
    parser.add_argument("--vocabulary", type=int, default=4000, help="entries of the WordPiece vocabulary")
    parser.add_argument("--size", default="d128", help="of the BERT")
    parser.add_argument("--steps", type=int, default=2000, help="of pre-training, 2,048 tokens each")
    parser.add_argument("--sst2-examples", type=int, default=10_000, help="to train on, of the 67,349")
    parser.add_argument("--rte-examples", type=int, default=2490, help="to train on, of the 2,490")
    parser.add_argument("--seeds", type=int, default=5, help="of fine-tuning")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    args = parser.parse_args()

    args.output.mkdir(parents=True, exist_ok=True)
    vocabulary, run = args.output / "vocab.txt", args.output / "bert"
    if not vocabulary.exists():
        learn_vocabulary(args.text, vocabulary, args.vocabulary)
    threads = ("--threads", args.threads)
    isoloss(
        *("train", run, "--language", args.text, "--tokenizer", vocabulary, "--length", 64, "--batch-size", 32),
        *("--masking", "fraction", "--fraction", 0.3, "--size", args.size, "--dropout", 0, "--schedule", "linear"),
        *("--steps", args.steps, "--checkpoints", 0, *threads),
    )
    trained, fresh = run / "checkpoints" / f"step-{args.steps}", run / "checkpoints" / "step-0"
    convex = ("--solver", "convex", "--regularization", *(10.0**-k for k in range(6)))
    for task, folder, examples in (("sst2", args.sst2, args.sst2_examples), ("rte", args.rte, args.rte_examples)):
        common = ("--task", task, "--data", folder, "--num-train", examples, "--max-length", 64, *threads)
        results = ("--output", args.output / "results")
        isoloss("transfer", trained, fresh, *common, *results, "--pooling", "mean", *convex)
        isoloss("transfer", trained, fresh, *common, *results, "--method", "finetune", "--seeds", args.seeds)


if __name__ == "__main__":
    main()
