#!/bin/sh
# Two models of one loss, one of them trained to be flat, and what isoloss compare says of them: about two minutes.
# Stop it at any moment; the same command goes on.
set -eu
configs=$(cd "$(dirname "$0")" && pwd)
mkdir -p runs/demo
cd runs/demo
echo "Which of two models with the same loss is flatter? Training both on the documentation of Python ..."
test -d tokenizer || isoloss tokenizer python:docs --vocab-size 1000 --output tokenizer >/dev/null
trap 'kill $(jobs -p) 2>/dev/null || true' INT TERM EXIT
isoloss train plain --config "$configs/plain.toml" >plain.log 2>&1 &
plain=$!
isoloss train penalized --config "$configs/penalized.toml" >penalized.log
wait $plain || { cat plain.log >&2; exit 1; }
echo "isoloss compare plain penalized --data python:docs --same-loss-nats 0.05 --html page.html"
isoloss compare plain penalized --data python:docs --same-loss-nats 0.05 --html page.html
echo "The page: runs/demo/page.html"
echo "Next: isoloss compare with two checkpoints and a text of yours, or the tutorial, docs/tutorial.md"
