#!/bin/sh
# Does a flatter model transfer better? Two small studies, and two models compared: about five minutes on two cores.
# Stop it at any moment; the same command goes on.
set -eu
configs=$(cd "$(dirname "$0")" && pwd)
mkdir -p runs/demo
cd runs/demo
trap 'kill $(jobs -p) 2>/dev/null || true' INT TERM EXIT

# what a study prints of its units goes to a log
study() {
    isoloss study run "$1" --scale demo --folder "$1" 2>"$1.log" || { tail -n 20 "$1.log" >&2; exit 1; }
}

echo "1. A laboratory where flatness decides: the model of the paper's theory, eight seeds. Two minutes ..."
study brackets
echo
echo "2. One where the answer is open: transformers on two random grammars, too few for a verdict. Two minutes ..."
study dose-response
echo
echo "3. Which of two models with the same loss is flatter? Training both on the documentation of Python ..."
test -d tokenizer || isoloss tokenizer python:docs --vocab-size 1000 --output tokenizer >/dev/null
isoloss train plain --config "$configs/plain.toml" >plain.log 2>&1 &
plain=$!
isoloss train penalized --config "$configs/penalized.toml" >penalized.log
wait $plain || { cat plain.log >&2; exit 1; }
echo "isoloss compare plain penalized --data python:docs --loss-margin 0.05 --html page.html"
isoloss compare plain penalized --data python:docs --loss-margin 0.05 --html page.html
echo "The page: runs/demo/page.html"
echo "Next: isoloss compare with two checkpoints and a text of yours, or the tutorial, docs/tutorial.md"
