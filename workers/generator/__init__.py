"""The generator: prompts with credit in, chunks out; it takes new weights while decoding."""
