"""Reads prompt files into a resumable stream of prompts, ``source.PromptSource``.

**The rule.** A bad line is reported with file and line, and skipped. A bad file or configuration
raises an error: a missing file, a file that is not Parquet, an unknown verifier, or no usable line."""
