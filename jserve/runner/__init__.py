"""The device side: compiled steps over a paged KV pool."""
