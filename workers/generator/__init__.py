"""The generator: prompts with credit in, chunks out; new weights taken while it decodes."""
