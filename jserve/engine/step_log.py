"""The step log: what one line says. Knows names only."""

from __future__ import annotations

# One JSON array per step, in this order, after a header object that repeats it.
FIELDS = (
    "t_s",  # when the step began
    "step_s",
    "decode_rows",
    "prefill_tokens",
    "chunks",
    "context_tokens",
    "attended_pairs",
    "bucket_tokens",
    "bucket_rows",
    "pages_used",
    "pages_cached",
    "waiting",
    "running",
    "preemptions",
    "predicted_s",
)
