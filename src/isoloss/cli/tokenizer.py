"""`isoloss tokenizer`: learn a tokenizer from text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from isoloss import files
from isoloss.cli import common, options
from isoloss.errors import IsolossError, warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EXAMPLES = [
    ("isoloss tokenizer text/ --output tokenizer", "WordPiece, 8,000 tokens, lower-cased"),
    (
        "isoloss tokenizer hf:Skylion007/openwebtext --max-documents 10000 --kind bpe --output tokenizer",
        "byte-level BPE",
    ),
]


@dataclass(frozen=True)
class Args:
    """Learn a tokenizer from text and write it as a Hugging Face folder, which --tokenizer takes."""

    texts: options.Positional[tuple[str, ...]]
    """Text (.txt, .jsonl or a folder), or datasets hf:NAME."""
    output: Path
    """Folder for the tokenizer, new or empty."""
    vocab_size: int = 8000
    """Tokens, special ones included."""
    kind: Literal["wordpiece", "bpe"] = "wordpiece"
    """WordPiece, as BERT's, or byte-level byte-pair encoding, as GPT-2's."""
    cased: bool = False
    """For WordPiece: keep upper case and accents."""
    column: str = "text"
    """For JSON lines and datasets: the field or column with the text."""
    split: str | None = None
    """For datasets; default: train."""
    max_documents: int | None = None
    """How many documents are read; default: all."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "tokenizer", arguments, examples=EXAMPLES)
    if args.cased and args.kind == "bpe":
        raise IsolossError("--cased is for wordpiece: byte-level BPE keeps all characters as they are")
    files.check_writable(args.output.parent)
    from isoloss.text.documents import read_documents
    from isoloss.text.tokenizers import train_tokenizer

    documents = read_documents(args.texts, column=args.column, split=args.split, max_documents=args.max_documents)
    tokenizer = train_tokenizer(
        (text for _, text in documents), vocab_size=args.vocab_size, kind=args.kind, lowercase=not args.cased
    )
    if len(tokenizer) < args.vocab_size:
        warn(f"the tokenizer has {len(tokenizer):,} tokens, not {args.vocab_size:,}: the texts hold no more")
    # only the finished tokenizer tells the same command from another one
    if not _is_there(args.output, tokenizer):
        with files.new_output(args.output) as folder:
            tokenizer.save_pretrained(folder)
    if args.json:
        common.emit_json({"tokenizer": str(args.output), "kind": args.kind, "tokens": len(tokenizer)})
    else:
        common.say(f"{args.output}: {args.kind} tokenizer of {len(tokenizer):,} tokens")
    return 0


def _is_there(folder: Path, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the folder holds this tokenizer, made by the same command before."""
    from isoloss.text.tokenizers import load_tokenizer, serialized

    if not (folder / "tokenizer.json").is_file():
        return False
    return serialized(load_tokenizer(str(folder))) == serialized(tokenizer)
