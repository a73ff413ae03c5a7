"""What a request asks for: its body, its length in tokens, its prompt as hashed blocks."""
