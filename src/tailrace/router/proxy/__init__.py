"""The life of a request: admission, attempts, retries, and the response."""
