"""The local learning coefficient beside devinterp's: the same settings on the same model, on one thread.

A causal Llama is trained briefly on walks over a ring. Both sample at a step size with as many chains, draws and
burn-in steps, and both are given the same inverse temperature. isoloss samples again at half the step, which its
estimate rests on, with twice the draws; the processor time of both is divided in that proportion. Where isoloss refuses
the chains as not converged, the values of both are still compared, because that is what devinterp prints.

    pip install devinterp==2.0.1
    python benchmarks/learning_coefficient.py
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from timing import heading, record_of
from transformers import LlamaConfig, LlamaForCausalLM

from isoloss.errors import IsolossError
from isoloss.files import write_text
from isoloss.flatness import learning_coefficient as sampler
from isoloss.flatness.learning_coefficient import ChainMean, chain_mean

RESULTS = Path(__file__).parent / "results"
VOCABULARY, SEQUENCES, LENGTH, STEPS = 32, 256, 16, 300
CHAINS, DRAWS, BURN_IN, BATCH, LOCALIZATION = 4, 200, 200, 32, 300.0
STEP_SIZES = (2e-5,)
HEAT = SEQUENCES / math.log(SEQUENCES)


def walks(number: int, seed: int) -> torch.Tensor:
    """Return walks on a ring: one step to the right or left, sometimes none."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-1, 2, (number, LENGTH), generator=generator)
    steps[:, 0] = torch.randint(0, VOCABULARY, (number,), generator=generator)
    return steps.cumsum(dim=1) % VOCABULARY


def trained() -> LlamaForCausalLM:
    """Return a small Llama after a short training."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        ids = walks(32, step + 1)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def ours(model: LlamaForCausalLM, ids: torch.Tensor, step_size: float) -> Iterator[ChainMean]:
    """Yield the means over isoloss's chains, at the step and at half of it with twice the draws, converged or not."""
    batches = [{"input_ids": rows, "labels": rows} for rows in ids.split(BATCH)]
    chains = {"num_chains": CHAINS, "num_draws": DRAWS, "burn_in": BURN_IN}
    with mock.patch.object(sampler, "chain_mean", side_effect=chain_mean) as made, contextlib.suppress(IsolossError):
        sampler.local_learning_coefficient(model, batches, localization=LOCALIZATION, step_size=step_size, **chains)
    yield from (chain_mean(*call.args) for call in made.call_args_list)


def theirs(model: LlamaForCausalLM, ids: torch.Tensor, step_size: float) -> Iterator[ChainMean]:
    """Yield the mean over devinterp's chains, without its burn-in, which its own mean includes."""
    from datasets import Dataset
    from devinterp.slt.sampling import sample

    data = Dataset.from_dict({"input_ids": ids.tolist()}).with_format("torch")
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        found = sample(
            model,
            data,
            {},
            lr=step_size,
            n_beta=HEAT,
            num_chains=CHAINS,
            num_draws=DRAWS,
            num_burnin_steps=BURN_IN,
            batch_size=BATCH,
            num_init_loss_batches=SEQUENCES // BATCH,
            localization=LOCALIZATION,
            device="cpu",
        ).dataset
        trace = found.sampling_loss_micro.mean(dim=["batch_sampling", "token_pos"]).transpose("chain", "step").values
        start = float(found.init_loss.values.mean())
    yield chain_mean(HEAT * (torch.from_numpy(trace).double()[:, BURN_IN:] - start))


def main() -> None:
    """Sample by turns, and write values and processor seconds."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    model, ids = trained(), walks(SEQUENCES, 0)
    rows: list[dict[str, Any]] = []
    for step_size in STEP_SIZES:
        for name, run in {"isoloss": ours, "devinterp": theirs}.items():
            begun = time.process_time()
            found = list(run(model, ids, step_size))
            seconds = time.process_time() - begun
            for part, mean in enumerate(found):
                who = f"{name}, half the step" if part else name
                # twice the draws take twice as long
                share = (1 + part) / sum(range(1, len(found) + 1))
                rows.append({"step": step_size, "who": who, **mean._asdict(), "seconds": share * seconds})
                print(rows[-1], flush=True)
    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """Write the rows with what they were measured by."""
    libraries = ("isoloss", "devinterp", "torch", "transformers")
    record = {**record_of("learning_coefficient.py", libraries), "results": rows}
    write_text(RESULTS / "learning_coefficient.json", json.dumps(record, indent=1) + "\n")
    lines = heading("The local learning coefficient, beside devinterp's", record)
    lines += [" ".join((__doc__ or "").split("\n\n")[1].split()), ""]
    lines += [
        f"{CHAINS} chains of {DRAWS} draws after {BURN_IN} steps, {SEQUENCES} sequences of {LENGTH} tokens, {BATCH}"
    ]
    lines += [
        f"a step; gamma {LOCALIZATION:g}, n beta {HEAT:.2f}. Seconds are processor time.",
        "",
    ]
    lines += ["| step | who | value | R-hat | effective draws | seconds |", "|---:|---|---:|---:|---:|---:|"]
    for row in rows:
        cells = [f"{row['step']:g}", row["who"], f"{row['value']:.1f} ± {row['stderr']:.1f}", f"{row['r_hat']:.2f}"]
        cells += [f"{row['effective_draws']:.0f}", f"{row['seconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    write_text(RESULTS / "learning_coefficient.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
