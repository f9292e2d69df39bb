"""From a request to its text: generate, batches, the engine, and the caches that they keep."""
