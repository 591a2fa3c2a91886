"""A tokenizer's files as one archive, for those who tokenise elsewhere. Knows files' names and zip:
no protocol."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile

from jserve.engine.input_processor import InputProcessor

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date in a zip: equal files make equal archives


class TokenizerArchive:
    """The archive of one processor, made once, in a thread: it takes most of a second."""

    def __init__(self) -> None:
        self._making: asyncio.Future[tuple[bytes, str]] | None = None

    async def of(self, processor: InputProcessor) -> tuple[bytes, str]:
        """Returns a zip and its SHA-256 in hexadecimal digits."""
        if self._making is None:
            self._making = asyncio.ensure_future(asyncio.to_thread(_archive, processor))
        return await asyncio.shield(self._making)  # a caller that leaves, leaves others theirs


def _archive(processor: InputProcessor) -> tuple[bytes, str]:
    limits = processor.limits
    about = {
        "model_type": limits.model_type,
        "architectures": limits.architectures,
        "vocab_size": limits.vocab_size,
        "max_position_embeddings": limits.max_model_len,
    }
    eos = {"eos_token_id": list(limits.eos_token_ids)}
    files = processor.tokenizer.files() | {
        "config.json": json.dumps(about | eos),
        "generation_config.json": json.dumps(eos),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(files.items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o644 << 16
            archive.writestr(info, text, zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()
