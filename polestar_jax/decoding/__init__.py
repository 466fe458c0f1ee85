"""Decoding: prompts in, text out, with any cache policy and any commit policy."""
