"""What did a study find?

The results of a study are one folder of tables. This script reads the study of models with the same loss in this
repository. For your own: `isoloss study new`, `isoloss study run`, `isoloss study export`; its page has the figures.
"""

from pathlib import Path

import polars as pl

from isoloss import read_study

study = read_study(Path(__file__).parent.parent / "results" / "same-loss-27-grammars-repeated")
print(f"{study.provenance['study']}: {study.provenance['blocks']} grammars, {len(study.provenance['runs'])} runs\n")

print("claims, written before the runs, and what came out")
cases = ["trace", "minimal-trace", "prefix-4"]
tested = study.claims.filter(pl.col("verdict") != "not tested", pl.col("case").is_in(cases))
for row in tested.iter_rows(named=True):
    interval = f"{row['difference']:+8.3g} ({row['low']:.3g} to {row['high']:.3g}) {row['unit']}"
    print(f"{row['claim']:18} {row['case']:14} {row['verdict']:13} {interval}")

print("\nmodels with about the same loss: means over grammars")
print("                         KL (nats)  trace  minimal trace  accuracy of a probe")
wide = study.wide().filter(pl.col("kl") < 0.02)
means = wide.group_by("group").agg(pl.col("kl", "trace", "minimal-trace", "probe-prefix-4").mean()).sort("trace")
for group, kl, trace, least, accuracy in means.iter_rows():
    print(f"{group:22} {kl:9.4f} {trace:8.1f} {least:10.1f} {100 * accuracy:17.1f} %")
