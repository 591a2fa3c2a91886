#!/usr/bin/env bash
# Runs EleutherAI's lm-evaluation-harness, unmodified, against jserve's /v1/completions: a task of
# multiple choice (log-probabilities of given continuations) and one of generation, both made of the
# questions beside this script. The tokenizer is the server's, by /tokenize and /tokenizer_info.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/lib.sh
. scripts/compat/lib.sh

client_venv lm_eval 3.12 "lm-eval[api]==0.4.13"
serve --flagfile=configs/cpu_default.flags "$@"
model=$(curl -sf "$url/v1/models" | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 "$client/bin/lm_eval" run --model local-completions \
  --model_args "model=$model,base_url=$url/v1/completions,tokenizer_backend=remote,num_concurrent=4,max_retries=1" \
  --tasks capitals_choice,capitals_write --include_path scripts/compat/lm_eval
