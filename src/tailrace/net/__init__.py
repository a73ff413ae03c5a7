"""HTTP/1.1: message heads, body framing, server and client connections."""
