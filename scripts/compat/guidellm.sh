#!/usr/bin/env bash
# Loads jserve with vLLM's guidellm, unmodified: streamed chats, 1 to 16 at a time. Flags go to the
# server. With torch's CPU build first: guidellm would bring gigabytes of CUDA.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/lib.sh
. scripts/compat/lib.sh

client_venv guidellm 3.11 "torch==2.13.0" "guidellm==0.8.1"
serve --flagfile=configs/cpu_default.flags "$@"
HF_HUB_OFFLINE=1 "$client/bin/guidellm" run --disable-console-interactive \
  --backend "kind=openai_http,target=$url,request_format=/v1/chat/completions,max_tokens=48" \
  --profile kind=concurrent --override profile.streams 1,4,16 \
  --constraint kind=max_requests,count=48 \
  --data kind=json_file,path=scripts/compat/guidellm_prompts.jsonl \
  --output kind=console
