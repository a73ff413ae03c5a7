"""HTTP/1.1: heads, body framing, server and client connections, event streams, /metrics pages."""
