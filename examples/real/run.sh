#!/bin/sh
# Which of four copies of a real model compute the same function, which are flatter, which lose less at 4 bits and under noise?
# About eight minutes on two cores (600 to 800 seconds of processor time), with 4.3 GB of memory and 2.7 GB of disk. Stop it at
# any moment; the same command goes on.
set -eu
copies=$(cd "$(dirname "$0")" && pwd)/copies.py
mkdir -p runs/real
cd runs/real

echo "1. SmolLM2-135M, and four copies: rounded to NF4 and to int4, with 10 % noise, and rescaled exactly ..."
python "$copies" .
echo "2. isoloss compare original nf4 int4 noisy rescaled --length 64 --num-sequences 16 --output kept --html page.html"
isoloss compare original nf4 int4 noisy rescaled --length 64 --num-sequences 16 --output kept --html page.html
echo "The page: runs/real/page.html"
