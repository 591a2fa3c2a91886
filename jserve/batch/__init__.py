"""Offline batch jobs: a file of requests in, a file of answers out.

The output has one JSON record per input line: {"line": its number from 1, "id", "custom_id",
"response": {"status_code", "request_id", "body"} or null, "error": {"code", "message"} or null},
as in the OpenAI batch API, plus `line`. It is also the journal that a killed job resumes from.
"""

from jserve.batch.job import BatchOptions, BatchSummary, Order, run_batch
from jserve.batch.main import run

__all__ = ["BatchOptions", "BatchSummary", "Order", "run", "run_batch"]
